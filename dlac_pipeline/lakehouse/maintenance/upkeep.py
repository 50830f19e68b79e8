"""Upkeep of DLAC's own tables: merge small files, expire snapshots, remove files that nothing names.

Safe beside live committers and beside other upkeep, at any moment, and safe to kill. Source tables are not DLAC's: they are
never touched.
"""

from dataclasses import dataclass

from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS
from dlac_pipeline.lakehouse.errors import CommitConflict
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.older_ledger import check_warehouse
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.maintenance.compaction import Merged, compact
from dlac_pipeline.lakehouse.maintenance.expiry import expire
from dlac_pipeline.lakehouse.maintenance.orphans import Removed, remove_orphans


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
