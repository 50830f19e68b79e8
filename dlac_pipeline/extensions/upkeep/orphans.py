"""Orphans: files in the folders of DLAC's own tables that no retained snapshot names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyarrow.fs import FileInfo, FileSelector, FileType
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.errors import LakehouseError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.metadata_files import JOURNAL, METADATA, resolve
from dlac_pipeline.lakehouse.iceberg.own_rows import decoding, own_files
from dlac_pipeline.lakehouse.ledger.older_ledger import check_journal
from dlac_pipeline.lakehouse.ledger.schemas import ledger_uuid_of
from dlac_pipeline.lakehouse.maintenance.expiry import UPKEEP_OF_SNAPSHOT, LeanTransaction
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """Number of deleted files, and their bytes."""

    files: int = 0
    bytes: int = 0


class TableFolder:
    """The data and metadata folders of a table, and the paths of files in them as the filesystem spells them."""

    def __init__(self, table: Table) -> None:
        """Raises `LakehouseError` for a warehouse whose files cannot be listed."""
        places = table.location_provider()
        self._io = table.io
        self._filesystem, metadata_path = resolve(self._io, places.metadata_path)
        self.folders = [self.path(places.data_path), metadata_path]

    def files(self) -> dict[str, FileInfo]:
        """Return path -> file of everything in both folders, without the journal."""
        selectors = (FileSelector(folder, allow_not_found=True, recursive=True) for folder in self.folders)
        listed = (info for selector in selectors for info in self._filesystem.get_file_info(selector))
        kept = f"{self.folders[0]}/{JOURNAL}/"
        return {info.path: info for info in listed if info.type == FileType.File and not info.path.startswith(kept)}

    def metadata(self, path: str) -> dict[str, Any]:
        """Return the content of a metadata file. Empty if it is gone (each commit removes the oldest) or no JSON object."""
        try:
            with self._filesystem.open_input_stream(path) as stream:
                found = json.loads(stream.read())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        except UnicodeDecodeError as err:
            raise LakehouseError(
                f"expected a table's metadata as JSON in {path!r}, found something else ({err}): nothing was deleted; move it"
            ) from err
        return found if isinstance(found, dict) else {}

    def delete(self, path: str) -> bool:
        """Delete a file, unless another process was faster."""
        try:
            self._filesystem.delete_file(path)
        except FileNotFoundError:
            return False
        return True

    def path(self, location: str) -> str:
        """Return the path of an address."""
        return resolve(self._io, location)[1]


def remove_orphans(lakehouse: Lakehouse, name: str, *, checked: bool = False) -> Removed:
    """Delete files of an own table that no retained snapshot names.

    `checked`: the ledger is known to be the newest. Newer files would be the only copy of lost commits. Raise `LakehouseError`,
    `LedgerOlderThanStore` or `CommitConflict`.
    """
    if name == "consumption" and not checked:
        check_journal(lakehouse)
    folder = TableFolder(lakehouse.own(name))
    try:
        return _remove(lakehouse, name, folder)
    except OSError as err:
        raise LakehouseError(f"expected to list and delete files of table {name!r}, found {err}") from err


def _remove(lakehouse: Lakehouse, name: str, folder: TableFolder) -> Removed:
    own_metadata = isinstance(lakehouse.catalog, MetastoreCatalog)  # those of a REST catalog only its server knows
    listed = {path: info for path, info in folder.files().items() if own_metadata or not path.endswith(METADATA)}
    if not listed.keys() - lakehouse.look(name, partial(_named, folder)):
        return Removed()
    _move_main(lakehouse, name)
    orphans = listed.keys() - lakehouse.look(name, partial(_named, folder))
    _check_foreign(folder, orphans, lakehouse.own(name))
    gone = [listed[path] for path in sorted(orphans) if folder.delete(path)]
    return Removed(files=len(gone), bytes=sum(info.size or 0 for info in gone))


def _move_main(lakehouse: Lakehouse, name: str) -> None:
    """Commit a snapshot that changes nothing: a commit that was built on an earlier read of the table then fails."""

    def once() -> None:
        table = lakehouse.own(name)
        with reachable(lakehouse.config.uri), as_commit_conflict(), LeanTransaction(table) as transaction:
            transaction.update_snapshot(snapshot_properties={UPKEEP_OF_SNAPSHOT: "orphans"}).fast_append().commit()

    retrying()(once)


def _named(folder: TableFolder, table: Table) -> set[str]:
    return {folder.path(location) for location in _locations(table)}


def _check_foreign(folder: TableFolder, orphans: set[str], table: Table) -> None:
    """Raise `LakehouseError` if another table with rows is stored here, such as one whose catalog was lost."""
    for path in orphans:
        found = folder.metadata(path) if path.endswith(METADATA) else {}
        if found.get("snapshots") and found.get("table-uuid") not in (
            str(table.metadata.table_uuid),
            ledger_uuid_of(table),
        ):
            raise LakehouseError(
                f"expected the files of one table in {folder.folders!r}, found those of table {found.get('table-uuid')}, "
                f"too, in {path!r}: nothing was deleted; register that table in a catalog, or move its files away"
            )


def _locations(table: Table) -> Iterator[str]:
    yield table.metadata_location
    yield from (entry.metadata_file for entry in table.metadata.metadata_log)
    seen = set()
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        with decoding(table, snapshot.manifest_list):
            manifests = [each for each in snapshot.manifests(table.io) if each.manifest_path not in seen]
        for manifest in manifests:
            seen.add(manifest.manifest_path)
            yield manifest.manifest_path
            with decoding(table, manifest.manifest_path):
                files = [entry.data_file for entry in manifest.fetch_manifest_entry(table.io)]
            yield from (each.file_path for each in own_files(table, files))
