"""Blocks of one key group from one source, from a cursor on, prepared ahead, and the stream of their rows as samples."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from dlac_pipeline.lakehouse.errors import TransformFailed
from dlac_pipeline.plan.cut import Slices
from dlac_pipeline.plan.source_order import Cursor, RowRange, SourceOrder
from dlac_pipeline.plan.units import Ints, UnitTable
from dlac_pipeline.read.layout import Segment
from dlac_pipeline.read.line import BlockAdvance, merge
from dlac_pipeline.read.prefetch import Prefetcher, Wanted
from dlac_pipeline.rows.columns import Column
from dlac_pipeline.rows.transform import RowRejected

Columns = dict[str, Column]
Piece = tuple[Columns, Ints]
"""Columns, and the rows of them that are the samples."""
RowSpan = tuple[Columns, slice]
"""Columns, and consecutive rows of them."""
Prepared = TypeVar("Prepared")
PORTION_BYTES = 2**22
"""Encoded bytes of slices that are worth one decoding task where rows are read in the table's order."""
_SCRATCH = 4
"""A row group takes up to so many times its size while it is decoded: as read, decompressed, decoded, in growing buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Result of a stream: `count` samples were passed, and `pieces` contain the requested ones, in order."""

    count: int
    items: int
    """Tokens without padding among the requested samples. Without packing, the samples."""
    pieces: list[Piece]
    advances: list[BlockAdvance] = field(default_factory=list)


@dataclass(slots=True)
class SourceBlocks(Generic[Prepared]):
    """The blocks of one source, decoded and prepared ahead for one rank.

    With `portions` a block that is not shuffled is decoded a few slices at a time, as no more of it is needed in memory.
    """

    source: int
    order: SourceOrder
    prefetch: Prefetcher
    prepare: Callable[[RowRange], Prepared]
    size_of: Callable[[Prepared], int]
    portions: bool = False
    _row_bytes: float | None = None

    def walk(self, group: int, cursor: Cursor) -> "BlockWalk[Prepared]":
        """The blocks of a key group from a cursor on."""
        return BlockWalk(self, group, cursor)

    def wanted(self, group: int, row_range: RowRange) -> Wanted[Prepared]:
        """Return the preparation of a range's block."""
        units, slices = row_range.cut.units, row_range.slices
        rows = row_range.stop - row_range.start

        def prepare() -> Prepared:
            try:
                return self.prepare(row_range)
            except RowRejected as err:
                unit, row = row_range.block.place_of(err.position)
                path = units.file_paths[int(units.file[unit])]
                raise TransformFailed(f"row {units.first_row[unit] + row} of {path!r}: {err}") from err

        def size_of(prepared: Prepared) -> int:
            size = self.size_of(prepared)
            self._row_bytes = size / rows
            return size

        size = int(_encoded_bytes(units, slices).sum()) if self._row_bytes is None else int(rows * self._row_bytes)
        first = 0 if row_range.portion is None else row_range.portion[0]
        key = (self.source, row_range.pass_index, group, row_range.block.index, first)
        whole = int(units.bytes[slices.unit].max(initial=0))  # of a slice, too, all of the row group is decoded
        twice = size if row_range.cut.settings.shuffle else 0  # rows that are put in order are in memory twice
        return Wanted(key, size, max(_SCRATCH * whole, twice), prepare, size_of)

    def row_ranges(self, group: int, cursor: Cursor) -> Iterator[RowRange]:
        """Yield the row_ranges of a key group from a cursor on, each as large as is decoded at once."""
        for row_range in self.order.row_ranges(group, self.order.consumed_at(group, cursor)):
            if self.portions and not row_range.cut.settings.shuffle:
                yield from row_range.portions(_slices_at_once(row_range))
            else:
                yield row_range


def size_of_segments(segments: Iterable[Segment]) -> int:
    """Their bytes."""
    return sum(segment.nbytes for segment in segments)


def _slices_at_once(row_range: RowRange) -> list[int]:
    """Return how many consecutive slices of a block to decode together: few small ones, or one large one."""
    counts, size = [0], 0
    for encoded in _encoded_bytes(row_range.cut.units, row_range.block.slices).tolist():
        if counts[-1] and size + encoded > PORTION_BYTES:
            counts.append(0)
            size = 0
        counts[-1] += 1
        size += encoded
    return counts


def _encoded_bytes(units: UnitTable, slices: Slices) -> Ints:
    """Return the uncompressed size of each slice, estimated from the footers, int64."""
    size: Ints = units.bytes[slices.unit] * slices.rows // np.maximum(1, units.rows[slices.unit])
    return size


class BlockWalk(Generic[Prepared]):
    """Iteration over (range, prepared block). The next block is requested as soon as one is given out."""

    def __init__(self, blocks: SourceBlocks[Prepared], group: int, cursor: Cursor) -> None:
        self._blocks = blocks
        self._prefetch = blocks.prefetch
        self._group = group
        self._row_ranges = blocks.row_ranges(group, cursor)
        self._held: deque[Wanted[Prepared]] = deque()
        self._upcoming = next(self._row_ranges, None)
        self._ask()

    def __iter__(self) -> Iterator[tuple[RowRange, Prepared]]:
        return self

    def __next__(self) -> tuple[RowRange, Prepared]:
        self.release()
        return self._take()

    def take_ready(self) -> tuple[RowRange, Prepared] | None:
        """Return the next block while the one before is held, if it is ready and, as no shuffled one is, small."""
        upcoming = self._upcoming
        if upcoming is None or upcoming.cut.settings.shuffle:
            return None
        return self._take() if self._prefetch.is_ready(self._blocks.wanted(self._group, upcoming).key) else None

    def _take(self) -> tuple[RowRange, Prepared]:
        row_range = self._upcoming
        if row_range is None:
            raise StopIteration
        self._held.append(self._blocks.wanted(self._group, row_range))
        prepared = self._prefetch.take(self._held[-1])
        self._upcoming = next(self._row_ranges, None)
        self._ask()
        return row_range, prepared

    def close(self) -> None:
        """Forget held blocks and requests."""
        self.release()
        if self._upcoming is not None:
            self._prefetch.forget(self._blocks.wanted(self._group, self._upcoming).key)

    def begin(self) -> None:
        """Begin to prepare the next block, which is needed now."""
        if self._upcoming is not None:
            self._prefetch.begin(self._blocks.wanted(self._group, self._upcoming).key)

    def shrink(self, nbytes: int, *, blocks: int = 1) -> None:
        """Count so many bytes from now on of the `blocks`-th of the held blocks, from the last."""
        self._prefetch.shrink(self._held[-blocks].key, nbytes)

    @property
    def is_ended(self) -> bool:
        """True if no block follows."""
        return self._upcoming is None

    def _ask(self) -> None:
        if self._upcoming is not None:
            self._prefetch.ask(self._blocks.wanted(self._group, self._upcoming))

    def release(self, *, keep: int = 0) -> None:
        """Release the held blocks, which are read, but for the last `keep`."""
        while len(self._held) > keep:
            self._prefetch.release(self._held.popleft().key)


class UndecodedWalk:
    """Iteration over (range, no columns): for rows whose places alone are wanted."""

    def __init__(self, row_ranges: Iterator[RowRange]) -> None:
        self._row_ranges = row_ranges
        self._upcoming = next(row_ranges, None)

    def __next__(self) -> tuple[RowRange, list[Segment]]:
        row_range, self._upcoming = self._upcoming, next(self._row_ranges, None)
        if row_range is None:
            raise StopIteration
        return row_range, [Segment(row_range.start, row_range.stop, {})]

    def take_ready(self) -> None:
        """Return None: no block is prepared."""

    def release(self, *, keep: int = 0) -> None:
        """Do nothing: no block is held."""

    def begin(self) -> None:
        """Do nothing: no block is prepared."""

    def shrink(self, nbytes: int, *, blocks: int = 1) -> None:
        """Do nothing: no block is held."""

    @property
    def is_ended(self) -> bool:
        """True if no block follows."""
        return self._upcoming is None

    def close(self) -> None:
        """Do nothing: no block is held."""


@dataclass(slots=True)
class RowStream:
    """Live rows as samples."""

    _walk: BlockWalk[list[Segment]] | UndecodedWalk
    cursor: Cursor
    _row_range: RowRange | None = None
    _segments: deque[Segment] = field(default_factory=deque)
    """Segments of the block being read that are left, the one being read first."""
    _next: tuple[RowRange, list[Segment]] | None = None
    """The block after it, if that is taken."""
    _at: int = 0

    @property
    def in_last_block(self) -> bool:
        """True if no further block follows the one being read."""
        return self._walk.is_ended and self._next is None

    @property
    def exhausted(self) -> bool:
        """True if no row can follow."""
        return self._walk.is_ended and not self.rows_left

    def take(self, count: int, low: int, high: int) -> Given:
        """Pass up to `count` rows, and give those from the `low`-th to before the `high`-th of them."""
        done = 0
        pieces: list[Piece] = []
        advances: list[BlockAdvance] = []
        while done < count and not self.exhausted:
            row_range, segment = self._entered()
            stop = min(segment.stop, self._at + count - done)
            first, last = max(self._at, self._at + low - done), min(stop, self._at + high - done)
            if first < last:
                pieces.append((segment.columns, np.arange(first, last) - segment.start))
            advances.append(self._advance(row_range, stop))
            done += stop - self._at
            self._at = stop
        items = sum(len(rows) for _, rows in pieces)
        return Given(count=done, items=items, pieces=pieces, advances=merge(advances))

    @property
    def ready_rows(self) -> int:
        """Rows of the block being read that are left, but for its last one: taking them does not lead out of it."""
        return max(0, self.rows_left - 1)

    @property
    def rows_left(self) -> int:
        """Rows that are left of the block being read, and of the one after it if that is taken."""
        following = 0 if self._next is None else self._next[0].stop - self._next[0].start
        return following + self._rows_here

    @property
    def _rows_here(self) -> int:
        """Rows of the block being read that are left."""
        return 0 if self._row_range is None else self._row_range.stop - self._at

    def take_ready(self) -> bool:
        """Take the block after the one being read, if it is ready. Return True if it is taken now."""
        before, self._next = self._next, self._next or self._walk.take_ready()
        return self._next is not before

    def value_bytes(self, until: Ints, most: int) -> Ints:
        """Return the bytes of the values of several lengths in the next until[i] rows, for each i. Above `most` it is a bound."""
        used = np.zeros(len(until), dtype=np.int64)
        left = [(segment.start - self._at, segment) for segment in self._segments]
        if self._next is not None:
            shift = self._rows_here - self._next[0].start
            left += [(segment.start + shift, segment) for segment in self._next[1]]
        for begin, segment in left:
            first = max(0, begin)
            if first > int(until[-1]) or used[-1] > most:
                break
            stops = np.minimum(np.maximum(until, first), begin + segment.stop - segment.start) - begin
            for column in segment.columns.values():
                if column.offsets is not None:
                    used += (column.offsets[stops] - column.offsets[first - begin]) * column.values.itemsize
        return used

    def begin_next(self, rows: int) -> None:
        """Release a block that is read, and begin to prepare the next one if so many rows, which are needed now, lead into it."""
        if not self._rows_here:
            self._segments.clear()
        self._walk.release(keep=bool(self._rows_here) + (self._next is not None))
        if self.rows_left < rows:
            self._walk.begin()

    def run(self, until: Ints) -> tuple[list[RowSpan], Ints]:
        """Return the next until[-1] rows, which exist, and the cursor after each batch, int64 [batches, 4].

        `until` counts the rows up to the end of each of several batches.
        """
        cursors = np.empty((len(until), 4), dtype=np.int64)
        cursors[:] = self.cursor
        pieces: list[RowSpan] = []
        done, total = 0, int(until[-1])
        while done < total:
            row_range, segment = self._entered()
            start, stop = self._at, min(segment.stop, self._at + total - done)
            pieces.append((segment.columns, slice(start - segment.start, stop - segment.start)))
            first, last = until.searchsorted([done, done + stop - start], side="right").tolist()
            ends, positions = start + until[first:last] - done, row_range.block.live_positions
            cursors[first:] = (row_range.pass_index, row_range.block.index, 0, 0)
            cursors[first:last, 2] = ends if positions is None else positions[ends - 1] + 1
            done, self._at = done + stop - start, stop
        self.cursor = Cursor(*cursors[-1].tolist())
        return pieces, cursors

    def close(self) -> None:
        """Release the blocks."""
        self._segments.clear()
        self._walk.close()

    def _entered(self) -> tuple[RowRange, Segment]:
        """Return the block and the segment with the next row."""
        if self._row_range is None or self._at == self._row_range.stop:
            self._segments.clear()
            self._row_range, segments = self._next or next(self._walk)
            self._next = None
            self._segments.extend(segments)
            self._at = self._row_range.start
        elif self._at == self._segments[0].stop:
            self._segments.popleft()
            self._walk.shrink(size_of_segments(self._segments), blocks=1 if self._next is None else 2)
        return self._row_range, self._segments[0]

    def _advance(self, row_range: RowRange, stop: int) -> BlockAdvance:
        pass_index, block = row_range.pass_index, row_range.block
        begin = self.cursor.position if self.cursor[:2] == (pass_index, block.index) else 0
        self.cursor = Cursor(pass_index, block.index, block.position_after(stop))
        return BlockAdvance(
            pass_index=pass_index,
            block=block.index,
            position_start=begin,
            position_end=self.cursor.position,
            rows_consumed=stop - self._at,
            filtered=_NOTHING,
            quarantined=(),
        )


_NOTHING = np.zeros(0, dtype=np.int64)
