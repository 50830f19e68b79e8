"""A file format of another author: Arrow IPC files, whose units are record batches."""

from typing import Any

import pyarrow as pa


class ArrowFooter:
    """Footer of an Arrow file."""

    def __init__(self, file: Any) -> None:
        self.schema = file.schema
        self.rows = [file.get_batch(unit).num_rows for unit in range(file.num_record_batches)]

    def bytes_of(self, unit: int) -> int:
        """Return a size."""
        return int(self.rows[unit]) * 8

    def bounds(self, unit: int, column: str, wanted: pa.DataType) -> None:
        """Return None: no statistics are known."""

    def values(self, unit: int, column: str) -> None:
        """Return None: no counts are known."""


class ArrowFiles:
    """The format."""

    def read_footer(self, stream: Any, fields: Any) -> ArrowFooter:
        """Read a footer."""
        return ArrowFooter(pa.ipc.open_file(stream))

    def read_unit(
        self, stream: Any, footer: ArrowFooter, unit: int, columns: Any, *, remote: bool, threads: bool
    ) -> pa.Table:
        """Decode a record batch."""
        return pa.Table.from_batches([pa.ipc.open_file(stream).get_batch(unit)]).select(columns)


ARROW = ArrowFiles()
