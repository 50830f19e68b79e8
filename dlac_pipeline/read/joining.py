"""Tables laid end to end into one: columns are copied into one leased array each, where their types allow."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.iceberg.columns import large_form
from dlac_pipeline.read.memory import Buffers, Bytes

LARGEST_BYTES = 2**31
"""So many bytes of strings, or items of lists, do not fit the offsets of an array."""


def end_to_end(parts: Iterable[pa.Table], rows: int, buffers: Buffers) -> pa.Table:
    """Return tables of one schema and so many rows together as one. Each is released before the next is made where types allow.

    Columns of fixed width, and lists of one length of them, are copied into one leased array. Rows are then gathered from one
    place, and the memory into which a part was decoded is used again for the next one, while it is in the processor's cache.
    """
    columns: dict[str, _Joined] = {}
    for part in parts:
        for name in part.column_names:
            columns.setdefault(name, _Joined(rows, buffers)).add(part[name])
    return pa.table({name: column.joined() for name, column in columns.items()})


def take_rows(table: pa.Table, rows: Any) -> pa.Table:
    """Return these rows of a table. Strings that may not fit the offsets of a string array get 64-bit offsets."""
    for place, column in enumerate(table.columns):
        large = large_form(column.type)
        if large != column.type and column.num_chunks > 1 and column.nbytes >= LARGEST_BYTES:
            table = table.set_column(place, table.field(place).with_type(large), column.cast(large))
    return table.take(rows)


class _Joined:
    def __init__(self, rows: int, buffers: Buffers) -> None:
        self._rows = rows
        self._buffers = buffers
        self._at = 0
        self._row_bytes = 0
        self._type: pa.DataType | None = None
        self._content: Bytes = np.zeros(0, dtype=np.uint8)
        self._chunks: list[pa.Array] = []

    def add(self, column: pa.ChunkedArray) -> None:
        for chunk in column.chunks:
            flat = None if self._chunks or not len(chunk) else _flat(chunk)
            if flat is not None and not self._at:
                self._type, self._row_bytes = chunk.type, len(flat) // len(chunk)
                self._content = self._buffers.lease(self._rows * self._row_bytes)
            if flat is None or len(flat) != self._row_bytes * len(chunk):
                self._chunks = [*self._copied(), chunk]
                continue
            self._content[self._at * self._row_bytes :][: len(flat)] = flat
            self._at += len(chunk)

    def joined(self) -> pa.ChunkedArray:
        chunks = self._chunks or self._copied()
        if len({chunk.type for chunk in chunks}) > 1:  # `take_rows` gave some of them offsets of 64 bits
            chunks = [chunk.cast(large_form(chunk.type)) for chunk in chunks]
        return pa.chunked_array(chunks)

    def _copied(self) -> list[pa.Array]:
        """Return the content as an Arrow array of its type, or the arrays that were added before a copy was impossible."""
        if not self._at:
            return self._chunks
        rows, kind = self._at, self._type
        self._at = 0
        if not isinstance(kind, pa.ListType):
            return [pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(self._content)])]
        length = self._row_bytes * 8 // kind.value_type.bit_width
        values = pa.Array.from_buffers(kind.value_type, rows * length, [None, pa.py_buffer(self._content)])
        offsets = pa.array(np.arange(rows + 1, dtype=np.int64) * length, type=pa.int32())
        return [pa.ListArray.from_arrays(offsets, values, type=kind)]


def _flat(array: Any) -> Bytes | None:
    """Return the bytes of an array, as many for each row, or None where they cannot be laid end to end."""
    rows = len(array)
    if isinstance(array.type, pa.ListType):
        lengths = np.diff(array.offsets.to_numpy())
        if array.null_count or not lengths[0] or (lengths != lengths[0]).any() or lengths[0] * rows >= LARGEST_BYTES:
            return None
        array = array.flatten()
    kind = array.type
    fixed = pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind)
    if array.null_count or not fixed or kind.bit_width % 8:
        return None
    width = kind.bit_width // 8
    content = np.frombuffer(array.buffers()[1], dtype=np.uint8)
    return content[array.offset * width : (array.offset + len(array)) * width]
