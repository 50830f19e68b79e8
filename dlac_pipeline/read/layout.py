"""Layout of a block: its rows in reading order, in segments that are released one by one while the block is read.

The order of a block's rows is known before they are decoded. So the thread that decodes them also puts them in order, and a
batch is made of a few contiguous copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.errors import UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.columns import byte_strings_in
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.rows.columns import Array, Column, Flags, Ints

WIDE_BYTES = 256
"""Rows of this size on average are gathered from the memory into which they were decoded. Others are laid end to end first."""
_SEGMENT_BYTES = 2**23
_MOST_SEGMENTS = 8
_VIEW = np.dtype([("length", np.int32), ("prefix", np.int32), ("buffer", np.int32), ("begin", np.int32)])
"""An element of an Arrow array of binary views. Up to 12 bytes follow their length directly."""
_INLINE = 12
_WINDOW_BYTES = 2**30
"""A view begins before this place of its buffer. Longer memory is several buffers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start .. stop-1 of a block's live rows, in reading order."""

    start: int
    stop: int
    columns: dict[str, Column]

    @property
    def nbytes(self) -> int:
        """The bytes of its columns."""
        return sum(column.nbytes for column in self.columns.values())


def lay_out(
    columns: Mapping[str, Sequence[Column]], rows: Ints | slice, start: int, buffers: Buffers
) -> Iterator[Segment]:
    """Yield the rows of columns in this order as segments, from live row `start` on.

    A column has one part or several, whose rows are numbered through. Those of a span of rows are not copied.
    """
    if isinstance(rows, slice):
        ends = np.cumsum([0, *(part.rows for part in next(iter(columns.values())))]).tolist()
        for index, (begin, end) in enumerate(pairwise(ends)):
            low, high = max(begin, rows.start), min(end, rows.stop)
            if low < high:
                mine = slice(low - begin, high - begin)
                part = {name: _span_of(parts[index], mine) for name, parts in columns.items()}
                yield Segment(start + low - rows.start, start + high - rows.start, part)
        return
    nbytes = sum(part.nbytes for parts in columns.values() for part in parts)
    taken = {name: _Gather(parts) if len(parts) > 1 else _Single(parts[0], buffers) for name, parts in columns.items()}
    count = max(1, min(_MOST_SEGMENTS, nbytes // _SEGMENT_BYTES, len(rows)))
    for index in range(count):
        first, stop = index * len(rows) // count, (index + 1) * len(rows) // count
        part = {name: column.take(rows[first:stop]) for name, column in taken.items()}
        yield Segment(start + first, start + stop, part)


def _span_of(column: Column, rows: slice) -> Column:
    valid = None if column.valid is None else column.valid[rows]
    if column.offsets is None:
        return Column(column.values[rows], None, valid)
    return Column(column.values, column.offsets[rows.start : rows.stop + 1], valid)


class _Single:
    """Column of one part, whose rows are taken in any order."""

    def __init__(self, column: Column, buffers: Buffers) -> None:
        self._column, self._buffers = column, buffers

    def take(self, rows: Ints) -> Column:
        """Return these rows."""
        values, offsets = self._column.values, self._column.offsets
        valid = None if self._column.valid is None else self._column.valid[rows]
        if offsets is None:
            shape = (len(rows), *values.shape[1:])
            out = self._buffers.lease(len(rows) * values[:1].nbytes).view(values.dtype).reshape(shape)
            # Mode "clip" lets numpy write into `out` without a buffer between; rows are in range.
            return Column(values.take(rows, axis=0, out=out, mode="clip"), None, valid)
        size = values.itemsize
        places = pa.py_buffer(np.ascontiguousarray(offsets * size if size > 1 else offsets))
        content = pa.py_buffer(np.ascontiguousarray(values).view(np.uint8))
        array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), self._column.rows, [None, places, content])
        return _ragged(array.take(pa.array(rows)), values.dtype, valid)


class _Gather:
    """Column of several parts, whose rows are taken in any order with one copy of their bytes."""

    def __init__(self, parts: Sequence[Column]) -> None:
        self._parts = parts
        self._buffers: list[Array] = []
        self._views = np.zeros(sum(part.rows for part in parts), dtype=_VIEW)
        first = 0
        for part in parts:
            self._add(part, self._views[first : first + part.rows])
            first += part.rows

    def _add(self, part: Column, views: Array) -> None:
        content = np.ascontiguousarray(part.values).reshape(-1).view(np.uint8)
        if part.offsets is None:
            ends = np.arange(part.rows + 1, dtype=np.int64) * (len(content) // max(1, part.rows))
        else:
            ends = part.offsets * part.values.itemsize
        lengths = ends[1:] - ends[:-1]
        if lengths.max(initial=0) >= 2**31:
            raise UnsupportedColumn(f"expected rows of less than 2 GiB, found one of {lengths.max()} bytes: divide it")
        window = ends[:-1] // _WINDOW_BYTES
        views["length"], views["begin"] = lengths, ends[:-1] - window * _WINDOW_BYTES
        views["buffer"] = window + len(self._buffers)
        self._buffers += [content[at:] for at in range(0, max(1, len(content)), _WINDOW_BYTES)]

    def take(self, rows: Ints) -> Column:
        """Return these rows."""
        parts = self._parts
        flags = [part.valid for part in parts if part.valid is not None]
        valid = np.concatenate(flags)[rows] if flags else None
        # as complex numbers, because numpy takes those of 16 bytes faster than structures
        views = self._views.view(np.complex128)[rows].view(_VIEW)
        self._write_short(views)
        buffers = [None, *map(pa.py_buffer, [views, *self._buffers])]
        found = pa.Array.from_buffers(pa.binary_view(), len(rows), buffers).cast(pa.large_binary())
        dtype = parts[0].values.dtype
        if parts[0].offsets is not None:
            return _ragged(found, dtype, valid)
        ends, content = byte_strings_in(found)
        return Column(content[: ends[-1]].view(dtype).reshape(len(rows), *parts[0].values.shape[1:]), None, valid)

    def _write_short(self, views: Array) -> None:
        """Write values of up to 12 bytes into their views."""
        short = np.flatnonzero(views["length"] <= _INLINE)
        chosen, raw = views[short], views.view(np.uint8).reshape(-1, _VIEW.itemsize)
        raw[short, 4:] = 0
        for index in np.unique(chosen["buffer"][chosen["length"] > 0]).tolist():
            content = self._buffers[index]
            for place in range(_INLINE):
                mine = (chosen["buffer"] == index) & (chosen["length"] > place)
                raw[short[mine], 4 + place] = content[chosen["begin"][mine] + place]


def _ragged(array: pa.LargeBinaryArray, dtype: np.dtype[Any], valid: Flags | None) -> Column:
    ends, content = byte_strings_in(array)
    return Column(content[: ends[-1]].view(dtype), ends if dtype.itemsize == 1 else ends // dtype.itemsize, valid)
