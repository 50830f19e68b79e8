"""Upkeep of DLAC's own tables: merge small files, expire snapshots, remove files that nothing names.

Safe beside live committers and beside other upkeep, at any moment, and safe to kill. Source tables are not DLAC's: they are
never touched.

Files that no retained snapshot names are what expiry and compaction leave, and commits that failed. A file that is not named yet
may belong to a commit under way. So: list the files, move `main`, read the table again, and delete what was listed and is still
not named. The writer of a listed file had read the table before `main` moved. If its commit has not landed, the catalog refuses
it, and the writer repeats it with new files, as every writer of these tables does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS
from dlac_pipeline.lakehouse.errors import CommitConflict, LakehouseError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.metadata_files import METADATA, TableFolder
from dlac_pipeline.lakehouse.ledger.older_ledger import check_warehouse
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.maintenance.compaction import UPKEEP_OF_SNAPSHOT, Merged, compact
from dlac_pipeline.lakehouse.maintenance.expiry import LeanTransaction, expire
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """Number of deleted files, and their bytes."""

    files: int = 0
    bytes: int = 0


def remove_orphans(lakehouse: Lakehouse, name: str, *, checked: bool = False) -> Removed:
    """Delete the files of DLAC's own table `name` that no retained snapshot names.

    `checked`: the ledger is known to be the newest.

    Raises:
        CatalogUnreachable: the catalog was unavailable for a minute.
        CommitConflict: other processes committed all the time.
        LakehouseError: another table's files are among them, or they cannot be listed or deleted.
        LedgerOlderThanStore: the catalog was restored from an older backup. Newer files are the only copy of lost commits.
    """
    if name == "consumption" and not checked:
        check_warehouse(lakehouse)
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
    _check_foreign(folder, orphans, str(lakehouse.own(name).metadata.table_uuid))
    gone = [listed[path] for path in sorted(orphans) if folder.delete(path)]
    return Removed(files=len(gone), bytes=sum(info.size or 0 for info in gone))


def _move_main(lakehouse: Lakehouse, name: str) -> None:
    """Commit a snapshot that changes nothing: what was built on an earlier read of the table cannot land any more."""

    def once() -> None:
        table = lakehouse.own(name)
        with reachable(lakehouse.config.uri), as_commit_conflict(), LeanTransaction(table) as transaction:
            transaction.update_snapshot(snapshot_properties={UPKEEP_OF_SNAPSHOT: "orphans"}).fast_append().commit()

    retrying()(once)


def _named(folder: TableFolder, table: Table) -> set[str]:
    return {folder.path(location) for location in _locations(table)}


def _check_foreign(folder: TableFolder, orphans: set[str], table_uuid: str) -> None:
    """Raise `LakehouseError` if another table with rows is stored here, such as one whose catalog was lost."""
    for path in orphans:
        found = folder.metadata(path) if path.endswith(METADATA) else {}
        if found.get("snapshots") and found.get("table-uuid") != table_uuid:
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
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                yield manifest.manifest_path
                yield from (entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io))


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkept:
    """Result of upkeep on one of DLAC's tables."""

    table: str
    merged_files: int
    into_files: int
    expired_snapshots: int
    removed_files: int
    removed_bytes: int
    busy: bool
    """Others committed so often that something was left for the next time."""


def run_upkeep(lakehouse: Lakehouse, *, keep: int = KEEP_SNAPSHOTS) -> list[Upkept]:
    """Run upkeep on DLAC's own tables. `keep` is the number of snapshots that stay of each.

    Raises:
        CatalogUnreachable: the catalog was unavailable for a minute.
        LakehouseError: another table's files are among them, or they cannot be listed or deleted.
        LedgerOlderThanStore: the catalog was restored from an older backup. Nothing was changed.
    """
    check_warehouse(lakehouse)
    return [_upkeep_of(lakehouse, name, keep) for name in TABLES]


def _upkeep_of(lakehouse: Lakehouse, name: str, keep: int) -> Upkept:
    merged, expired, removed = Merged(), 0, Removed()
    busy = False
    try:
        if name == "consumption":
            merged = compact(lakehouse, name)
        expired = expire(lakehouse, name, keep=keep)
        removed = remove_orphans(lakehouse, name, checked=True)
    except CommitConflict:
        busy = True
    return Upkept(
        table=name,
        merged_files=merged.files,
        into_files=merged.into,
        expired_snapshots=expired,
        removed_files=removed.files,
        removed_bytes=removed.bytes,
        busy=busy,
    )
