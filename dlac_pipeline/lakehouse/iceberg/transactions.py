"""Transactions of pyiceberg that work their metadata out once per change, and not at every look.

pyiceberg copies a table's whole metadata, deeply, some twenty times in the course of one append, though nothing has changed in
between: with twenty snapshots in it, that was half of what the append took of the processor.
"""

from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableUpdate


class LeanTransaction(Transaction):
    """A transaction whose `table_metadata` is kept until another update is staged. Callers must not change the result."""

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
