"""Items of one key group's blocks in, sequences or samples out, with a cursor exactly behind the last item taken.

A source's blocks make one line of items (tokens of documents, or samples), over block and pass boundaries. What was taken is
told in advances: intervals of block positions that follow each other without gap or overlap. An advance ends right behind
its last row; where that row was read only in part, `token_end` says how far, and the next advance begins at the same row.
Rows that give no item are told with the next row of their block; behind the last one, when the next block's first item is
taken or the line has ended. So the cursor is where the last advance ends, and what is behind a cursor depends on nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from catalog.errors import CursorMismatch, SpecInvalid
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.columns import Array
from dlac_pipeline.read.documents import Documents, Samples, SourceRows
from dlac_pipeline.read.tokenizing import Tokens
from dlac_pipeline.read.transform import Rejected

Masks = npt.NDArray[np.int32]
Content = TypeVar("Content", bound=Documents | Samples)
Piece = tuple[Content, int, int]
"""Items first .. stop-1 of a block."""
BEGINNING = Cursor()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockAdvance:
    """What was taken of one block: positions [position_start, position_end), the first and last perhaps in part."""

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
        """Where the cursor stands behind this advance."""
        if self.token_end is None:
            return Cursor(self.pass_index, self.block, self.position_end)
        return Cursor(self.pass_index, self.block, self.position_end - 1, self.token_end)


def merge(advances: Iterable[BlockAdvance]) -> list[BlockAdvance]:
    """Advances in the order in which they were taken, those of one block joined.

    Raises:
        CursorMismatch: an advance does not begin where the one before it, of the same block, ended.
    """
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """What was passed by one call; `cursor` is where the line goes on."""

    count: int
    """Sequences or samples; fewer than asked for at the end of the line."""
    items: int
    """Tokens without padding, or samples."""
    cursor: Cursor
    advances: list[BlockAdvance]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed(Taken):
    """Sequences of T tokens."""

    tokens: Tokens
    """[count, T]"""
    document: Masks
    """[count, T]: 1, 2, 3, ... within each sequence; 0 is padding. Tokens attend to tokens of their own document only."""
    position: Masks
    """[count, T]: restarts at 0 with each document, and with each sequence: the beginning of a document that is continued from
    the sequence before cannot be attended to any more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRows(Taken):
    """Samples of dense columns."""

    columns: dict[str, Array]
    """Column -> [count] or [count, length]; no columns where count is 0."""


@dataclass(slots=True)
class _Open(Generic[Content]):
    """A block of the line, of which `taken` items are taken; `cursor` is where its last advance ended."""

    content: Content
    cursor: Cursor
    taken: int
    rows: SourceRows

    @property
    def last(self) -> int:
        """The last position that is told of this block, -1 if there is none."""
        rows = self.rows
        ends = [
            *rows.positions[-1:].tolist(),
            *rows.filtered[-1:].tolist(),
            *(each[0] for each in rows.quarantined[-1:]),
        ]
        return max(ends, default=-1)

    @property
    def done(self) -> bool:
        """Whether all of it is told."""
        return self.last < self.cursor.position  # a row read in part is not behind the cursor

    def advance(self, items: int) -> BlockAdvance:
        """Take items of this block, at least one."""
        self.taken += items
        row = int(self.rows.ends.searchsorted(self.taken, side="right"))
        begin = int(self.rows.ends[row - 1]) if row else 0
        if begin == self.taken:
            return self._to(int(self.rows.positions[row - 1]) + 1, row, None)
        return self._to(int(self.rows.positions[row]) + 1, row, self.taken - begin)

    def leave(self) -> list[BlockAdvance]:
        """Pass over the rows that give no item behind the last one that does."""
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


class _Line(Generic[Content]):
    """The items of a key group's blocks, one after the other, from `cursor` on."""

    def __init__(self, blocks: Iterable[tuple[int, int, Content]], start: Cursor) -> None:
        self._blocks: Iterator[tuple[int, int, Content]] = iter(blocks)
        self._open: deque[_Open[Content]] = deque()
        self._first = True
        self._error: Exception | None = None
        self._available = 0
        self.cursor = start

    def fill(self, items: int) -> int:
        """Enter blocks until so many items are there or the line has ended; how many there are."""
        while self._available < items and (entered := self._next()) is not None:
            block = self._enter(*entered)
            self._available += block.rows.items - block.taken
            self._open.append(block)
        return self._available

    def take(self, items: int) -> tuple[list[Piece[Content]], list[BlockAdvance]]:
        """Take this many items, which are there; at the end of the line also what lies behind its last item."""
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
        """Whether nothing of the blocks entered is left to take or to tell."""
        return all(block.done for block in self._open)

    def _next(self) -> tuple[int, int, Content] | None:
        if self._error is not None:  # a generator that raised has ended: what is lost must not look like the line's end
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


class Packer:
    """Sequences of `length` tokens of one key group and source, from the cursor `start` on.

    The first block given holds the rows of block `start` from `start.position` on: a row that was read in part is given whole
    again. At the end of the line the last sequence is filled up with `pad_id` (`drain`), or what does not fill a sequence stays
    pending behind the cursor. The sequences do not depend on where the line was resumed or how many were taken at a time.
    """

    def __init__(
        self,
        blocks: Iterable[tuple[int, int, Documents]],
        *,
        length: int,
        start: Cursor = BEGINNING,
        drain: bool = True,
        pad_id: int = 0,
    ) -> None:
        if length < 1:
            raise SpecInvalid(f"expected sequences of at least 1 token, found length {length!r}")
        self._line = _Line(blocks, start)
        self._length = length
        self._drain = drain
        self._pad_id = pad_id

    @property
    def cursor(self) -> Cursor:
        """Right behind the last token taken."""
        return self._line.cursor

    @property
    def exhausted(self) -> bool:
        """Whether nothing can follow; waits for the next block where that decides."""
        need = 1 if self._drain else self._length
        left = self._line.fill(need)
        return left < need and (left > 0 or self._line.done)

    def take(self, count: int) -> Packed:
        """Up to `count` sequences.

        Raises:
            CursorMismatch: the first block does not go on where the line was to be resumed.
        """
        items = self._items(count)
        pieces, advances = self._line.take(items)
        rows = -(-items // self._length)
        tokens, document, position = _laid_out(pieces, items, rows, self._length, self._pad_id)
        return Packed(
            count=rows,
            items=items,
            cursor=self.cursor,
            advances=advances,
            tokens=tokens,
            document=document,
            position=position,
        )

    def skip(self, count: int) -> Taken:
        """Pass over what `take` would give, without laying it out."""
        items = self._items(count)
        _, advances = self._line.take(items)
        return Taken(count=-(-items // self._length), items=items, cursor=self.cursor, advances=advances)

    def _items(self, count: int) -> int:
        wanted = count * self._length
        items = min(wanted, self._line.fill(wanted))
        return items if self._drain else items - items % self._length


class Sampler:
    """Samples of one key group and source without packing, from the cursor `start` on; otherwise as `Packer`."""

    def __init__(self, blocks: Iterable[tuple[int, int, Samples]], *, start: Cursor = BEGINNING) -> None:
        self._line = _Line(blocks, start)

    @property
    def cursor(self) -> Cursor:
        """Right behind the last sample taken."""
        return self._line.cursor

    @property
    def exhausted(self) -> bool:
        """Whether nothing can follow; waits for the next block where that decides."""
        return self._line.fill(1) == 0 and self._line.done

    def take(self, count: int) -> SampleRows:
        """Up to `count` samples; raises as `Packer.take`."""
        items = min(count, self._line.fill(count))
        pieces, advances = self._line.take(items)
        names = pieces[0][0].columns if pieces else ()
        columns = {name: _end_to_end([each.columns[name][low:high] for each, low, high in pieces]) for name in names}
        return SampleRows(count=items, items=items, cursor=self.cursor, advances=advances, columns=columns)

    def skip(self, count: int) -> Taken:
        """Pass over what `take` would give."""
        items = min(count, self._line.fill(count))
        _, advances = self._line.take(items)
        return Taken(count=items, items=items, cursor=self.cursor, advances=advances)


def _laid_out(
    pieces: list[Piece[Documents]], items: int, rows: int, length: int, pad_id: int
) -> tuple[Tokens, Masks, Masks]:
    """Tokens, documents and positions [rows, length] of pieces laid end to end."""
    shape = (rows, length)
    if not pieces:
        return np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    tokens = _end_to_end([content.values[first:stop] for content, first, stop in pieces])
    starts = _starts(pieces, items, length)
    lengths = np.append(starts[1:], items) - starts
    # Where a document begins with a sequence there are two starts; the first one has no length, and the number 0.
    first = starts.searchsorted(starts - starts % length, side="right") - 1
    number = (np.arange(1, len(starts) + 1) - first).astype(np.int32)
    document = number.repeat(lengths)
    position = np.arange(items, dtype=np.int32) - starts.astype(np.int32).repeat(lengths)
    return _shaped(tokens, shape, pad_id), _shaped(document, shape, 0), _shaped(position, shape, 0)


def _starts(pieces: list[Piece[Documents]], items: int, length: int) -> Ints:
    """Where sequences and where documents begin among tokens laid end to end, int64, sorted; both: twice."""
    starts, base = [np.arange(0, items, length)], 0
    for content, first, stop in pieces:
        low, high = content.ends.searchsorted((first + 1, stop))
        starts += [content.ends[low:high] + (base - first)]
        base += stop - first
        starts += [np.array([base])]
    starts.pop()
    return np.sort(np.concatenate(starts))


def _shaped(flat: Array, shape: tuple[int, int], fill: int) -> Array:
    missing = shape[0] * shape[1] - len(flat)
    return (np.append(flat, np.full(missing, fill, flat.dtype)) if missing else flat).reshape(shape)


def _end_to_end(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
