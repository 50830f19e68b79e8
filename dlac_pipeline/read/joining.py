"""Tables laid end to end into one: columns are copied into one leased array each, where their types allow."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dlac_pipeline.lakehouse.iceberg.columns import byte_strings_in, large_form
from dlac_pipeline.read.memory import Buffers, Bytes

LARGEST_BYTES = 2**31
"""So many bytes of strings, or items of lists, do not fit the offsets of an array."""
_SPARE = 1.25
"""Room for values of different lengths, in relation to the values seen so far."""
_SEEN = 8
"""One row in so many shows how long the others are."""


def end_to_end(parts: Iterable[pa.Table], rows: int, buffers: Buffers) -> pa.Table:
    """Return tables of one schema and so many rows together as one. Each is released before the next is made where types allow.

    Columns without nulls of fixed width, of byte strings, and lists of one length, are copied into leased arrays. Rows are then
    gathered from one place, and the memory into which a part was decoded is used again for the next one, while it is in the
    processor's cache. Of a small part of a larger table that cannot be copied so, the rows alone are kept.
    """
    return pa.table({name: chunks for name, [chunks] in join_columns(parts, rows, buffers).items()})


def join_columns(
    parts: Iterable[pa.Table], rows: int, buffers: Buffers, *, wide_bytes: int | None = None
) -> dict[str, list[pa.ChunkedArray]]:
    """Return each column of tables laid end to end as `end_to_end` does, but in parts if its rows have so many bytes."""
    joined: dict[str, _Joined] = {}
    apart: dict[str, list[pa.ChunkedArray]] = {}
    for part in parts:
        for name in part.column_names:
            column = part[name]
            if name not in joined and name not in apart:
                if wide_bytes is not None and column.nbytes >= wide_bytes * len(column):
                    apart[name] = []
                else:
                    joined[name] = _Joined(column.type, rows, buffers)
            if name in apart:
                apart[name] += [pa.chunked_array([chunk]) for chunk in column.chunks]
            else:
                joined[name].add(column)
    return apart | {name: [column.joined()] for name, column in joined.items()}


def take_rows(table: pa.Table, rows: Any) -> pa.Table:
    """Return these rows of a table. Strings that may not fit the offsets of a string array get 64-bit offsets."""
    for place, column in enumerate(table.columns):
        large = large_form(column.type)
        if large != column.type and column.num_chunks > 1 and column.nbytes >= LARGEST_BYTES:
            table = table.set_column(place, table.field(place).with_type(large), column.cast(large))
    return table.take(rows)


class _Joined:
    """Column that is laid end to end, as long as its chunks allow. Otherwise its chunks."""

    def __init__(self, kind: pa.DataType, rows: int, buffers: Buffers) -> None:
        self._copied: _Fixed | _ByteStrings = (
            _ByteStrings(rows, buffers) if _is_byte_string(kind) else _Fixed(rows, buffers)
        )
        self._chunks: list[pa.Array] = []

    def add(self, column: pa.ChunkedArray) -> None:
        for chunk in column.chunks:
            if not len(chunk):
                self._chunks += [] if self._copied.rows else [chunk]
            elif any(map(len, self._chunks)) or not self._copied.add(chunk):
                self._chunks = [*self._copied.given_up(), *filter(len, self._chunks), detached(chunk)]

    def joined(self) -> pa.ChunkedArray:
        chunks = self._copied.given_up() or self._chunks
        if len({chunk.type for chunk in chunks}) > 1:  # some of them got offsets of 64 bits
            chunks = [chunk.cast(large_form(chunk.type)) for chunk in chunks]
        return pa.chunked_array(chunks)


class _Fixed:
    """Content of a column whose rows have one width."""

    def __init__(self, rows: int, buffers: Buffers) -> None:
        self.rows = 0
        self._most_rows, self._buffers = rows, buffers
        self._row_bytes = 0
        self._type: pa.DataType | None = None
        self._content: Bytes = np.zeros(0, dtype=np.uint8)

    def add(self, chunk: Any) -> bool:
        """Copy a chunk with rows, or return False if it cannot be laid at the end."""
        flat = _flat(chunk)
        if flat is None:
            return False
        if not self.rows:
            self._type, self._row_bytes = chunk.type, len(flat) // len(chunk)
            self._content = self._buffers.lease(self._most_rows * self._row_bytes)
        if len(flat) != self._row_bytes * len(chunk):
            return False
        self._content[self.rows * self._row_bytes :][: len(flat)] = flat
        self.rows += len(chunk)
        return True

    def given_up(self) -> list[pa.Array]:
        """Return the rows as an array, if there are any, and keep none."""
        if not self.rows:
            return []
        rows, self.rows, kind = self.rows, 0, self._type
        if not isinstance(kind, pa.ListType):
            return [pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(self._content)])]
        length = self._row_bytes * 8 // kind.value_type.bit_width
        values = pa.Array.from_buffers(kind.value_type, rows * length, [None, pa.py_buffer(self._content)])
        offsets = pa.array(np.arange(rows + 1, dtype=np.int64) * length, type=pa.int32())
        return [pa.ListArray.from_arrays(offsets, values, type=kind)]


class _ByteStrings:
    """Content of a column of strings or bytes."""

    def __init__(self, rows: int, buffers: Buffers) -> None:
        self.rows = 0
        self._most_rows, self._buffers = rows, buffers
        self._type: pa.DataType | None = None
        self._ends: npt.NDArray[np.int64] = np.zeros(rows + 1, dtype=np.int64)
        self._content: Bytes = np.zeros(0, dtype=np.uint8)

    def add(self, chunk: Any) -> bool:
        """Copy a chunk with rows, or return False if it has nulls."""
        if chunk.null_count:
            return False
        offsets, content = byte_strings_in(chunk)
        first, begin = int(offsets[0]), int(self._ends[self.rows])
        end = begin + int(offsets[-1]) - first
        stop = self.rows + len(chunk)
        if end > len(self._content):
            expected = int(_SPARE * end * self._most_rows / stop)
            room = max(end, expected if _SEEN * stop >= self._most_rows else min(expected, 2 * end))
            grown = self._buffers.lease(room)
            grown[:begin] = self._content[:begin]
            self._content = grown
        self._content[begin:end] = content[first : int(offsets[-1])]
        np.add(offsets[1:], begin - first, out=self._ends[self.rows + 1 : stop + 1])
        self._type, self.rows = chunk.type, stop
        return True

    def given_up(self) -> list[pa.Array]:
        """Return the rows as an array, if there are any, and keep none."""
        if not self.rows:
            return []
        rows, self.rows, kind = self.rows, 0, self._type
        fits = kind != large_form(kind) and int(self._ends[rows]) < LARGEST_BYTES
        offsets = self._ends[: rows + 1].astype(np.int32) if fits else self._ends[: rows + 1]
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._content)]
        return [pa.Array.from_buffers(kind if fits else large_form(kind), rows, buffers)]


def _is_byte_string(kind: pa.DataType) -> bool:
    return large_form(kind) in (pa.large_string(), pa.large_binary())


def detached(rows: Any) -> Any:
    """Return an array or a record batch without memory of other rows: a copy, if it is a small part of what was decoded."""
    if 2 * rows.nbytes >= rows.get_total_buffer_size():
        return rows
    return rows.take(pa.array(np.arange(len(rows))))


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
