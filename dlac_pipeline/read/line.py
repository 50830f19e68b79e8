"""Line of the items of one key group's blocks, with a cursor exactly after the last item taken.

A source's blocks make one line of items (tokens of documents, or samples), over block and pass boundaries. Advances record
the items that were taken: intervals of block positions without gap or overlap. An advance ends directly after its last row.
If that row was read only in part, `token_end` gives how far, and the next advance begins at the same row. Rows without an item
are recorded with the next row of their block. After the last one, they are recorded when the next block's first item is taken or
the line has ended. So the cursor is the end of the last advance, and what follows a cursor depends on nothing else.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.samples import Items, SourceRows
from dlac_pipeline.rows.transform import Rejected

Content = TypeVar("Content", bound=Items)
Piece = tuple[Content, int, int]
"""Items first .. stop-1 of a block."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockAdvance:
    """Range taken of one block: positions [position_start, position_end), the first and last perhaps in part."""

    pass_index: int
    block: int
    position_start: int
    position_end: int
    rows_consumed: int
    """Rows whose last item is among those taken."""
    token_start: int | None = None
    """Items of the row at `position_start` that were taken before."""
    token_end: int | None = None
    """Items of the row at `position_end` - 1 that are taken now, where it has more."""
    filtered: Ints
    quarantined: Rejected

    @property
    def cursor(self) -> Cursor:
        """Return the cursor after this advance."""
        if self.token_end is None:
            return Cursor(self.pass_index, self.block, self.position_end)
        return Cursor(self.pass_index, self.block, self.position_end - 1, self.token_end)


def merge(advances: Iterable[BlockAdvance]) -> list[BlockAdvance]:
    """Join the advances of one block, in the order of taking. Raises `CursorMismatch` if one is missing or double."""
    merged: list[BlockAdvance] = []
    for advance in advances:
        if merged and (merged[-1].pass_index, merged[-1].block) == (advance.pass_index, advance.block):
            merged[-1] = _joined(merged[-1], advance)
        else:
            merged.append(advance)
    return merged


def _joined(one: BlockAdvance, two: BlockAdvance) -> BlockAdvance:
    begins = Cursor(two.pass_index, two.block, two.position_start, two.token_start or 0)
    if begins != one.cursor:
        raise CursorMismatch(
            f"expected the next advance to begin at {one.cursor}, found {begins}: one is missing or double"
        )
    return replace(
        one,
        position_end=two.position_end,
        token_end=two.token_end,
        rows_consumed=one.rows_consumed + two.rows_consumed,
        filtered=np.concatenate([one.filtered, two.filtered]),
        quarantined=one.quarantined + two.quarantined,
    )


@dataclass(slots=True)
class _Open(Generic[Content]):
    """A block of the line, with `taken` items taken. `cursor` is the end of its last advance."""

    content: Content
    cursor: Cursor
    taken: int
    rows: SourceRows

    @property
    def last(self) -> int:
        """The last position of this block that is recorded, or -1."""
        quarantined = [position for position, _ in self.rows.quarantined[-1:]]
        return int(max([*self.rows.positions[-1:], *self.rows.filtered[-1:], *quarantined], default=-1))

    @property
    def done(self) -> bool:
        return self.last < self.cursor.position  # a row read in part is not before the cursor

    def advance(self, items: int) -> BlockAdvance:
        """Take items of this block, at least one."""
        self.taken += items
        row = int(self.rows.ends.searchsorted(self.taken, side="right"))
        begin = int(self.rows.ends[row - 1]) if row else 0
        if begin == self.taken:
            return self._to(int(self.rows.positions[row - 1]) + 1, row, None)
        return self._to(int(self.rows.positions[row]) + 1, row, self.taken - begin)

    def leave(self) -> list[BlockAdvance]:
        """Skip the rows without an item after the last one that has some."""
        return [] if self.done else [self._to(self.last + 1, len(self.rows.ends), None)]

    def _to(self, end: int, row: int, token_end: int | None) -> BlockAdvance:
        start, filtered = self.cursor, self.rows.filtered
        low, high = filtered.searchsorted((start.position, end))
        advance = BlockAdvance(
            pass_index=start.pass_index,
            block=start.block,
            position_start=start.position,
            position_end=end,
            rows_consumed=row - int(self.rows.positions.searchsorted(start.position)),
            token_start=start.offset or None,
            token_end=token_end,
            filtered=filtered[low:high],
            quarantined=self.rows.quarantined[self._rejected(start.position) : self._rejected(end)],
        )
        self.cursor = advance.cursor
        return advance

    def _rejected(self, position: int) -> int:
        return bisect_left(self.rows.quarantined, position, key=lambda each: each[0])


class Line(Generic[Content]):
    """Items of a key group's blocks, in a row, from `cursor` on."""

    def __init__(self, blocks: Iterable[tuple[int, int, Content]], start: Cursor) -> None:
        self._blocks: Iterator[tuple[int, int, Content]] = iter(blocks)
        self._open: deque[_Open[Content]] = deque()
        self._first = True
        self._error: Exception | None = None
        self._available = 0
        self.cursor = start

    def fill(self, items: int) -> int:
        """Enter blocks until so many items are ready or the line has ended. Return how many are ready."""
        while self._available < items and (entered := self._next()) is not None:
            block = self._enter(*entered)
            self._available += block.rows.items - block.taken
            self._open.append(block)
        return self._available

    def take(self, items: int) -> tuple[list[Piece[Content]], list[BlockAdvance]]:
        """Take this many items, which are ready. At the end of the line, also take the rest after its last item."""
        self._available -= items
        pieces: list[Piece[Content]] = []
        advances: list[BlockAdvance] = []
        while items:
            block = self._open[0]
            count = min(items, block.rows.items - block.taken)
            if not count:
                advances += self._open.popleft().leave()
                continue
            advances.append(block.advance(count))
            pieces.append((block.content, block.taken - count, block.taken))
            items -= count
            if block.done:  # or it would hold its memory until the next block is entered
                self._open.popleft()
        if not self.fill(1):
            while self._open:
                advances += self._open.popleft().leave()
        advances = merge(advances)
        self.cursor = advances[-1].cursor if advances else self.cursor
        return pieces, advances

    @property
    def done(self) -> bool:
        """True if nothing of the entered blocks is left to take or to record."""
        return all(block.done for block in self._open)

    def _next(self) -> tuple[int, int, Content] | None:
        if self._error is not None:  # a generator that raised has ended: an error must not look like the line's end
            raise self._error
        try:
            return next(self._blocks, None)
        except Exception as err:
            self._error = err
            raise

    def _enter(self, pass_index: int, index: int, content: Content) -> _Open[Content]:
        first, self._first = self._first, False
        if not first or (pass_index, index) != self.cursor[:2]:
            if first and self.cursor.offset:
                raise self._mismatch(f"block {index} of pass {pass_index}")
            return _Open(content, Cursor(pass_index, index), 0, content.rows)
        rows, cursor = content.rows, self.cursor
        begins = int(rows.positions[0]) if len(rows.positions) else None
        if begins is not None and begins < cursor.position:
            raise self._mismatch(f"a row at position {begins}")
        if cursor.offset and (begins != cursor.position or cursor.offset >= int(rows.ends[0])):
            raise self._mismatch(
                f"{int(rows.ends[0]) if begins is not None else 0} items of the row at position {begins}"
            )
        return _Open(content, cursor, cursor.offset, rows)

    def _mismatch(self, found: str) -> CursorMismatch:
        return CursorMismatch(
            f"expected to read on at {self.cursor}, found {found}: the rows, the transform or the tokenizer changed"
        )
