"""Files of DLAC's own tables that no retained snapshot names: what expiry and compaction leave, and commits that failed.

A file that is not named yet may belong to a commit under way. So: list the files, move `main`, read the table again, and
delete what was listed and is still not named. Whoever wrote a listed file had read the table before; `main` has moved since,
so its commit is refused if it has not landed, and it repeats itself with new files, as every writer of these tables does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table

from catalog.compaction import UPKEEP_OF_SNAPSHOT
from catalog.connect import Lakehouse, reachable
from catalog.errors import LakehouseError
from catalog.retrying import overtaken, retrying
from catalog.transactions import LeanTransaction

_METADATA = ".metadata.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """How many files were deleted, and their bytes."""

    files: int = 0
    bytes: int = 0


def remove_orphans(lakehouse: Lakehouse, name: str) -> Removed:
    """Delete the files of DLAC's own table `name` that no retained snapshot names.

    Raises:
        CatalogUnreachable: the catalog stayed away for a minute.
        CommitConflict: others committed all the time.
        LakehouseError: another table's files are among them, or they cannot be listed or deleted.
    """
    folder = _Folder(lakehouse, lakehouse.own(name))
    try:
        return _remove(lakehouse, name, folder)
    except OSError as err:
        raise LakehouseError(f"expected to list and delete files of table {name!r}, found {err}") from err


def _remove(lakehouse: Lakehouse, name: str, folder: _Folder) -> Removed:
    listed = folder.files()
    if not listed.keys() - lakehouse.look(name, folder.named):
        return Removed()
    _move_main(lakehouse, name)
    orphans = listed.keys() - lakehouse.look(name, folder.named)
    folder.check_foreign(orphans)
    gone = [listed[path] for path in sorted(orphans) if folder.delete(path)]
    return Removed(files=len(gone), bytes=sum(info.size or 0 for info in gone))


def _move_main(lakehouse: Lakehouse, name: str) -> None:
    """Commit a snapshot that changes nothing: what was built on an earlier read of the table cannot land any more."""

    def once() -> None:
        table = lakehouse.own(name)
        with reachable(lakehouse.config.uri), overtaken(), LeanTransaction(table) as transaction:
            transaction.update_snapshot(snapshot_properties={UPKEEP_OF_SNAPSHOT: "orphans"}).fast_append().commit()

    retrying()(once)


class _Folder:
    """The data and metadata folders of a table, and the paths of files in them as the filesystem spells them."""

    def __init__(self, lakehouse: Lakehouse, table: Table) -> None:
        if not isinstance(table.io, PyArrowFileIO):
            raise LakehouseError(
                f"expected a warehouse that pyarrow reads, found {type(table.io).__name__}: its files cannot be listed"
            )
        self._io = table.io
        self._uuid = str(table.metadata.table_uuid)
        self._own_metadata = lakehouse.config.type == "sql"
        places = table.location_provider()
        self._folders = [self._path(places.data_path), self._path(places.metadata_path)]
        scheme, netloc, _ = PyArrowFileIO.parse_location(places.metadata_path, table.io.properties)
        self._filesystem: FileSystem = table.io.fs_by_scheme(scheme, netloc)

    def files(self) -> dict[str, FileInfo]:
        """Path -> what is there now. A REST catalog's own metadata files are left out: only its server knows them."""
        found = {}
        for folder in self._folders:
            for info in self._filesystem.get_file_info(FileSelector(folder, allow_not_found=True, recursive=True)):
                if info.type == FileType.File and (self._own_metadata or not info.path.endswith(_METADATA)):
                    found[info.path] = info
        return found

    def named(self, table: Table) -> set[str]:
        """Paths of all that the table's metadata and its retained snapshots name."""
        return {self._path(location) for location in _locations(table)}

    def check_foreign(self, orphans: set[str]) -> None:
        """Check that no other table with rows lives here, such as the one whose catalog was lost.

        Raises:
            LakehouseError: one does.
        """
        for path in orphans:
            found = self._metadata(path) if path.endswith(_METADATA) else {}
            if found.get("snapshots") and found["table-uuid"] != self._uuid:
                raise LakehouseError(
                    f"expected the files of one table in {self._folders!r}, found those of table {found['table-uuid']}, "
                    f"too, in {path!r}: nothing was deleted; register that table in a catalog, or move its files away"
                )

    def delete(self, path: str) -> bool:
        """Delete a file, unless somebody was faster."""
        try:
            self._filesystem.delete_file(path)
        except FileNotFoundError:
            return False
        return True

    def _metadata(self, path: str) -> dict[str, Any]:
        """What a metadata file says; empty if it is gone, as every commit removes the oldest, or was not written to its end."""
        try:
            with self._filesystem.open_input_stream(path) as stream:
                found: dict[str, Any] = json.loads(stream.read())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        except UnicodeDecodeError as err:
            raise LakehouseError(
                f"expected a table's metadata as JSON in {path!r}, found something else ({err}): nothing was deleted; move it"
            ) from err
        return found

    def _path(self, location: str) -> str:
        return PyArrowFileIO.parse_location(location, self._io.properties)[2]


def _locations(table: Table) -> Iterator[str]:
    yield table.metadata_location
    yield from (entry.metadata_file for entry in table.metadata.metadata_log)
    seen = set()
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                yield manifest.manifest_path
                yield from (entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io))
