"""Source tables: Iceberg tables of a catalog, and mirrors of the tables whose formats enter through the door `dlac.sources`."""

import logging
from collections.abc import Collection
from contextlib import suppress
from typing import Protocol

from pyarrow.fs import FileSelector
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import NoSuchTable, PinLost
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.metadata_files import resolve
from dlac_pipeline.lakehouse.source_names import ICEBERG, SOURCES, split_identifier

TABLE_ID = "dlac.external.table-id"
"""Property of a mirror: the id that the table's format gives it."""

FILE_CHECKS = Door("dlac.file_checks", "check of data files")
_DEMANDS = "dlac."
"""Beginning of the table properties that demand a check."""
_DATA_FOLDERS = ("write.data.path", "write.object-storage.path", "write.folder-storage.path")
_log = logging.getLogger(__name__)


class FileCheck(Protocol):
    """Check of Iceberg tables whose data files other programs may write over.

    Its entry point has the name of the table property that demands it, such as "dlac.registered-location".
    """

    def __call__(self, table: Table) -> None:
        """Raise `DataFileChanged` if a data file has changed since the table has it, or `DataFileUnreadable`."""


class SourceFormat(Protocol):
    """Format of source tables other than Iceberg. `source.format` in a job spec is the name of its entry point.

    Planner, reader, legs, history and audit read Iceberg tables. So a format shows its table as one, the mirror. The mirror
    is named `mirror_name(identifier, namespace)` in the lakehouse's own catalog, and has the property `TABLE_ID`.

    - A version is a snapshot. Its id is the number of the version.
    - The manifests of the snapshot name the data files in their place, with rows, bytes, partition values, and statistics of
      columns if the format has some. Each file has a format of `dlac.files`, or is Parquet.
    - Rows that are deleted are the rows of positional delete files, or of deletion vectors.
    - The schema of the snapshot has the columns of the version.
    - `main` has versions in growing order. The operation of each follows from its changes: append, replace, delete, overwrite.

    `dlac_pipeline.extensions.formats.mirror.MirroredFormat` writes the mirror for a format that lists the files of a version.
    """

    def load_version(self, lakehouse: Lakehouse, identifier: str, number: int | None) -> Table:
        """Return the mirror of a table, with this version as a snapshot. None: the newest version, as the head of main.

        `identifier` is the format and the absolute location of the table, such as "delta:/data/events".

        Raises:
            NoSuchTable, NoSuchSnapshot: there is no such table or version.
            UnsupportedSnapshot: the version cannot be read exactly.
            AppendHistoryLost: the table has lost versions that were read before.
            CommitConflict: other processes mirror the table all the time.
        """


def load_version(lakehouse: Lakehouse, identifier: str, number: int | None = None) -> Table:
    """Return a source table as it is now. Of another format, a version is mirrored first: the newest unless `number` names one.

    Raises:
        BadInput: the format is not installed, or a package that it needs.
        LakehouseError: as `SourceFormat.load_version`, and as `Lakehouse.load`.
    """
    place = split_identifier(identifier)
    if place is None:
        return lakehouse.load(identifier)
    if number is not None:
        with suppress(NoSuchTable):
            table = lakehouse.load(identifier)
            if table.snapshot_by_id(number) is not None:
                return table
    source: SourceFormat = SOURCES.load(place[0], setting="source.format", others=(ICEBERG,))
    return source.load_version(lakehouse, identifier, number)


def check_data_files(table: Table) -> None:
    """Check the data files of a table if one of its properties demands that. Raises as `FileCheck`."""
    for name in _demanded_checks(table):
        check: FileCheck = FILE_CHECKS.load(name, setting="a property of the table")
        check(table)


def name_outside(table: Table, name: str, paths: Collection[str]) -> None:
    """Log that data files are outside of the table's own folders, like files of a shallow clone or of `add_files`."""
    external = split_identifier(name)
    own = (
        (table.location(), *(table.properties.get(each, "") for each in _DATA_FOLDERS))
        if external is None
        else external[1:]
    )
    roots = tuple(f"{root.removeprefix('file://').rstrip('/')}/" for root in own if root)
    outside = sorted(path for path in paths if not path.removeprefix("file://").startswith(roots))
    if outside and not _demanded_checks(table):
        _log.warning(
            "%d of %d data files of %s are outside of its folder %s, such as %s: they are read, because the table names them",
            *(len(outside), len(paths), name, own[0], outside[0]),
        )


def _demanded_checks(table: Table) -> list[str]:
    demands = {name for name in table.properties if name.startswith(_DEMANDS)}
    return sorted(demands & FILE_CHECKS.points().keys()) if demands else []


def check_files_exist(lakehouse: Lakehouse, identifier: str, number: int, paths: Collection[str]) -> None:
    """Check that planned data files of a version of another format still exist. Raises `PinLost`."""
    io = PyArrowFileIO(lakehouse.config.catalog_properties())
    files, root = resolve(io, identifier.partition(":")[2])
    known = {info.path for info in files.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))}
    places = {path: io.parse_location(path, io.properties)[2] for path in paths}
    # those of a shallow clone may be in another folder
    gone = sorted(path for path, place in places.items() if place.startswith(f"{root}/") and place not in known)
    if gone:
        raise PinLost(
            f"expected {len(paths)} data files of version {number} of {identifier!r}, as planned, found {len(gone)} gone, such "
            f"as {gone[0]!r}: a cleaning of the table, such as VACUUM, removes files that newer versions do not need; restore "
            "them from a backup, or start a new run on the newest version, and have files kept longer than runs take (of Delta "
            "delta.deletedFileRetentionDuration, of Hudi hoodie.cleaner.*)"
        )


def retained_snapshots(table: Table) -> set[int]:
    """Return the snapshots whose data files must exist. Of a mirror these are the pinned ones, as VACUUM knows no others."""
    if TABLE_ID in table.properties:
        return {ref.snapshot_id for ref in table.refs().values() if ref.snapshot_ref_type == SnapshotRefType.TAG}
    return {kept.snapshot_id for kept in table.metadata.snapshots}
