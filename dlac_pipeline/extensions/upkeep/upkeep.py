"""Upkeep of DLAC's own tables: merge small files, expire snapshots, remove files that nothing names.

One checkpoint is one data file, so that a run of weeks has tens of thousands, and a scan opens every one. See docs/upkeep.md.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files, schema_to_pyarrow
from pyiceberg.table import FileScanTask, Table

from dlac_pipeline.extensions.upkeep.orphans import remove_orphans
from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS
from dlac_pipeline.lakehouse.errors import CommitConflict
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.own_rows import decoding, own_files
from dlac_pipeline.lakehouse.ledger.older_ledger import check_journal
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.maintenance.expiry import UPKEEP_OF_SNAPSHOT, LeanTransaction, expire, expire_in
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

SMALL_BYTES = 16 * 2**20
"""A data file that is smaller is merged with others of its partition."""
MIN_FILES = 8
"""Fewer are not worth a snapshot."""
_MAX_FILES = 512
_MERGED = ("consumption", "recoveries", "row_keys")
"""Tables to which checkpoints, recoveries and plans with row keys append small files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """Number of data files before and after a merge."""

    files: int = 0
    into: int = 0


def compact(lakehouse: Lakehouse, name: str = "consumption") -> Merged:
    """Merge the small data files of each partition of an own table.

    Raises CatalogUnreachable, CommitConflict, or LakehouseError if files that the table names are missing.
    """
    files = into = 0
    for partition in sorted(lakehouse.look(name, _small_files), key=str):
        while step := _merge(lakehouse, name, partition):
            files, into = files + step.files, into + step.into
    return Merged(files=files, into=into)


def _merge(lakehouse: Lakehouse, name: str, partition: tuple[Any, ...]) -> Merged | None:
    """Merge some files of one partition, in one commit. Return None if nothing can be merged."""
    limit = 2 * _MAX_FILES

    def once() -> Merged | None:
        nonlocal limit
        limit = max(limit // 2, MIN_FILES)  # less work has more luck beside busy committers
        with reachable(lakehouse.config.uri), as_commit_conflict():
            table = lakehouse.own(name)
            small = _small_files(table).get(partition, [])[:limit]
            totals = accumulate(task.file.file_size_in_bytes for task in small)
            tasks = [task for task, total in zip(small, totals, strict=True) if total <= 4 * SMALL_BYTES]
            return _rewrite(table, tasks) if len(tasks) >= MIN_FILES else None

    return retrying()(once)


def _small_files(table: Table) -> dict[tuple[Any, ...], list[FileScanTask]]:
    """Return small data files by partition, in the order of writing. Files with delete files are left alone."""
    found = defaultdict(list)
    spec = table.spec()
    with decoding(table, table.location()):
        tasks = list(table.scan().plan_files())
    own_files(table, [task.file for task in tasks])
    for task in tasks:
        file = task.file
        if file.spec_id == spec.spec_id and file.file_size_in_bytes < SMALL_BYTES and not task.delete_files:
            found[tuple(file.partition[at] for at in range(len(spec.fields)))].append(task)
    return found


def _rewrite(table: Table, tasks: Sequence[FileScanTask]) -> Merged:
    """Write the rows into as few files as possible, again on every try: older new files may count as orphans by now."""
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    with decoding(table, table.location()):
        rows = pa.concat_tables(scan.to_table([task]).cast(schema) for task in tasks)
    if "seq" in rows.column_names:
        rows = rows.sort_by("seq")  # stable: the rows of one append stay in their order
    if "key" in rows.column_names:
        rows = rows.sort_by([("key", "ascending", "at_start")])  # a look-up then reads one row group of the file
    files = list(_dataframe_to_data_files(table.metadata, rows, table.io))
    with LeanTransaction(table) as transaction:
        properties = {UPKEEP_OF_SNAPSHOT: "compaction"}
        with transaction.update_snapshot(snapshot_properties=properties).overwrite() as overwrite:
            for task in tasks:
                overwrite.delete_data_file(task.file)
            for file in files:
                overwrite.append_data_file(file)
        expire_in(transaction)
    return Merged(files=len(tasks), into=len(files))


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkept:
    """Result of upkeep on one of DLAC's tables."""

    table: str
    merged_files: int = 0
    into_files: int = 0
    expired_snapshots: int = 0
    removed_files: int = 0
    removed_bytes: int = 0
    busy: bool = False
    """Others committed so often that something was left for the next time."""


def run_upkeep(lakehouse: Lakehouse, *, keep: int = KEEP_SNAPSHOTS) -> list[Upkept]:
    """Run upkeep on DLAC's own tables. `keep` is the number of snapshots that stay of each.

    Raises:
        CatalogUnreachable: the catalog was unavailable for a minute.
        LakehouseError: another table's files are among them, or they cannot be listed or deleted.
        LedgerOlderThanStore: the catalog was restored from an older backup. Nothing was changed.
    """
    check_journal(lakehouse, fill=math.inf)
    return [_upkeep_of(lakehouse, name, keep) for name in TABLES]


def _upkeep_of(lakehouse: Lakehouse, name: str, keep: int) -> Upkept:
    done = Upkept(table=name)
    try:
        if name in _MERGED:
            merged = compact(lakehouse, name)
            done = replace(done, merged_files=merged.files, into_files=merged.into)
        done = replace(done, expired_snapshots=expire(lakehouse, name, keep=keep))
        removed = remove_orphans(lakehouse, name, checked=True)
        return replace(done, removed_files=removed.files, removed_bytes=removed.bytes)
    except CommitConflict:
        return replace(done, busy=True)
