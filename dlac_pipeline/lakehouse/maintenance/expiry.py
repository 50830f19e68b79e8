"""Expiry of snapshots of DLAC's own tables by the appends themselves, so that no commit grows slower.

Each commit copies, writes and reads a table's whole metadata, and every retained snapshot is part of it. Snapshots of a branch
or a tag stay. Expiry deletes no file: see dlac_pipeline/extensions/upkeep/orphans.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableUpdate
from pyiceberg.table.update.snapshot import ExpireSnapshots

from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.own_rows import write_small
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

UPKEEP_OF_SNAPSHOT = "dlac.upkeep"
"""Property of a snapshot: the upkeep that made it, which added and removed no row."""


class LeanTransaction(Transaction):
    """A transaction whose `table_metadata` is kept until another update is staged. Callers must not change the result.

    pyiceberg copies a table's whole metadata, deeply, some twenty times in the course of one append. With twenty snapshots in
    it, that was half of the append's processor time.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._known: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata with the staged updates."""
        base, updates = self._table.metadata, self._updates
        if self._known is None or self._known[0] is not base or self._known[1] is not updates:
            self._known = (base, updates, super().table_metadata)
        return self._known[2]

    def append_small(self, rows: pa.Table, *, snapshot_properties: dict[str, str]) -> None:
        """Append a few rows of one run as one small file."""
        with self.update_snapshot(snapshot_properties=snapshot_properties).merge_append() as append:
            append.append_data_file(write_small(self._table, rows))


@contextmanager
def committing(lakehouse: Lakehouse, table: Table) -> Iterator[LeanTransaction]:
    """Yield a transaction that expires snapshots and commits. Raises `CatalogUnreachable` or `CommitConflict`."""
    transaction = LeanTransaction(table)
    with reachable(lakehouse.config.uri), as_commit_conflict(), transaction:
        yield transaction
        expire_in(transaction)


def expire(lakehouse: Lakehouse, name: str, *, keep: int = KEEP_SNAPSHOTS) -> int:
    """Expire snapshots of an own table but the newest `keep` and the named ones. Return their number.

    Raises `CatalogUnreachable` or `CommitConflict` as `committing`, after a minute.
    """

    def once() -> int:
        table = lakehouse.own(name)
        before = len(table.metadata.snapshots)
        with reachable(lakehouse.config.uri), LeanTransaction(table) as transaction:
            expire_in(transaction, keep=keep)
        return before - len(table.metadata.snapshots)

    return retrying()(once)


def expire_in(transaction: Transaction, *, keep: int = KEEP_SNAPSHOTS) -> None:
    """Have `transaction` expire all snapshots but the newest `keep`, and the snapshots that a branch or a tag names."""
    metadata = transaction.table_metadata
    named = {ref.snapshot_id for ref in metadata.refs.values()}
    newest_first = sorted(metadata.snapshots, key=lambda each: each.sequence_number or 0, reverse=True)
    expendable = [each.snapshot_id for each in newest_first[keep:] if each.snapshot_id not in named]
    if expendable:
        ExpireSnapshots(transaction).by_ids(expendable).commit()
