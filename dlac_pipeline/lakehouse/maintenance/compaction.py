"""Compaction of DLAC's own tables: many small data files become few. Files are merged, rows never.

One checkpoint is one data file. A run of weeks has tens of thousands, and a scan opens every one. A merge is one `overwrite`
snapshot, built on the table object whose files were read, so it asserts that `main` has not moved since. Against live
committers the merge loses, reads again and takes fewer files. A commit that loses to a merge repeats itself, as after any
other conflict. Only data files change: no row, no `seq`, no property.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files, schema_to_pyarrow
from pyiceberg.table import FileScanTask, Table

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.maintenance.expiry import LeanTransaction, expire_in
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

UPKEEP_OF_SNAPSHOT = "dlac.upkeep"
"""Property of a snapshot: what was done, by which no row was added or taken."""
SMALL_BYTES = 16 * 2**20
"""A data file that is smaller is merged with others of its partition."""
MIN_FILES = 8
"""Fewer are not worth a snapshot."""
_MAX_FILES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """Number of data files before and after a merge."""

    files: int = 0
    into: int = 0


def compact(lakehouse: Lakehouse, name: str = "consumption") -> Merged:
    """Merge the small data files of each partition of DLAC's own table `name`.

    Raises:
        CatalogUnreachable: the catalog was unavailable for a minute.
        CommitConflict: other processes committed all the time. Earlier merges stay.
        LakehouseError: files that the table names are not in the warehouse.
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
    for task in table.scan().plan_files():
        file = task.file
        if file.spec_id == spec.spec_id and file.file_size_in_bytes < SMALL_BYTES and not task.delete_files:
            found[tuple(file.partition[at] for at in range(len(spec.fields)))].append(task)
    return found


def _rewrite(table: Table, tasks: Sequence[FileScanTask]) -> Merged:
    """Write the rows into as few files as possible, again on every try: older new files may count as orphans by now."""
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    rows = pa.concat_tables(scan.to_table([task]).cast(schema) for task in tasks)
    if "seq" in rows.column_names:
        rows = rows.sort_by("seq")  # stable: the rows of one append stay in their order
    files = list(_dataframe_to_data_files(table.metadata, rows, table.io))
    with LeanTransaction(table) as transaction:
        with transaction.update_snapshot(
            snapshot_properties={UPKEEP_OF_SNAPSHOT: "compaction"}
        ).overwrite() as overwrite:
            for task in tasks:
                overwrite.delete_data_file(task.file)
            for file in files:
                overwrite.append_data_file(file)
        expire_in(transaction)
    return Merged(files=len(tasks), into=len(files))
