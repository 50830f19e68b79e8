"""Expiry of snapshots of DLAC's own tables by the appends themselves, so that no commit grows slower.

Each commit copies, writes and reads a table's whole metadata, and every retained snapshot is part of it. So each append also
expires, in its own transaction, the snapshots past the newest `KEEP_SNAPSHOTS`. Nothing has to be scheduled, and nothing can
be half done. Snapshots of a branch or a tag stay. Expiry deletes no file: see dlac_pipeline/lakehouse/maintenance/orphans.py.
"""

from pyiceberg.table import Transaction
from pyiceberg.table.update.snapshot import ExpireSnapshots

from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.transactions import LeanTransaction
from dlac_pipeline.lakehouse.retrying import retrying


def expire(lakehouse: Lakehouse, name: str, *, keep: int = KEEP_SNAPSHOTS) -> int:
    """Expire all snapshots of DLAC's own table `name` but the newest `keep` and the named ones. Return their number.

    Raises:
        CatalogUnreachable: the catalog was unavailable for a minute.
        CommitConflict: other processes committed all the time.
    """

    def once() -> int:
        table = lakehouse.own(name)
        before = len(table.metadata.snapshots)
        with reachable(lakehouse.config.uri), LeanTransaction(table) as transaction:
            expire_in(transaction, keep=keep)
        return before - len(table.metadata.snapshots)

    return retrying()(once)


def expire_in(transaction: Transaction, *, keep: int = KEEP_SNAPSHOTS) -> None:
    """Have `transaction` expire all snapshots but the newest `keep`, and those that a branch or a tag names."""
    metadata = transaction.table_metadata
    named = {ref.snapshot_id for ref in metadata.refs.values()}
    newest_first = sorted(metadata.snapshots, key=lambda each: each.sequence_number or 0, reverse=True)
    expendable = [each.snapshot_id for each in newest_first[keep:] if each.snapshot_id not in named]
    if expendable:
        ExpireSnapshots(transaction).by_ids(expendable).commit()
