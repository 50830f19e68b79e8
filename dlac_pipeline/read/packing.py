"""Packing: documents of one key group's blocks in, sequences of T tokens out, or, without packing, samples."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.documents import Documents, Samples
from dlac_pipeline.read.line import BlockAdvance, Line, Piece
from dlac_pipeline.rows.columns import Array
from dlac_pipeline.rows.tokenizing import Tokens

Masks = npt.NDArray[np.int32]
BEGINNING = Cursor()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """Result of one call. `cursor` is where the line resumes."""

    count: int
    """Sequences or samples, fewer than requested at the end of the line."""
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
    """[count, T]: 1, 2, 3, ... within each sequence, 0 for padding. Tokens attend to tokens of their own document only."""
    position: Masks
    """[count, T]: restarts at 0 with each document, and with each sequence: the beginning of a document that is continued from
    the sequence before cannot be attended to any more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRows(Taken):
    """Samples of dense columns."""

    columns: dict[str, Array]
    """Column -> [count] or [count, length]. No columns where count is 0."""


class Packer:
    """Sequences of `length` tokens of one key group and source, from the cursor `start` on.

    The first block contains the rows of block `start` from `start.position` on: a row that was read in part is given whole
    again. At the end of the line the last sequence is filled up with `pad_id` (`drain`), or the rest that does not fill a
    sequence stays pending after the cursor. The sequences do not depend on where the line was resumed or how many were taken
    at a time.
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
        self._line = Line(blocks, start)
        self._length = length
        self._drain = drain
        self._pad_id = pad_id

    @property
    def cursor(self) -> Cursor:
        """The cursor directly after the last token taken."""
        return self._line.cursor

    @property
    def exhausted(self) -> bool:
        """True if nothing can follow. Waits for the next block where that decides."""
        need = 1 if self._drain else self._length
        ready = self._line.fill(need)
        return ready < need and (ready > 0 or self._line.done)

    def take(self, count: int) -> Packed:
        """Return up to `count` sequences.

        Raises:
            CursorMismatch: the first block does not continue where the line was to be resumed.
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
    """Samples of one key group and source without packing, from the cursor `start` on, otherwise as `Packer`."""

    def __init__(self, blocks: Iterable[tuple[int, int, Samples]], *, start: Cursor = BEGINNING) -> None:
        self._line = Line(blocks, start)

    @property
    def cursor(self) -> Cursor:
        """The cursor directly after the last sample taken."""
        return self._line.cursor

    @property
    def exhausted(self) -> bool:
        """True if nothing can follow. Waits for the next block where that decides."""
        return self._line.fill(1) == 0 and self._line.done

    def take(self, count: int) -> SampleRows:
        """Return up to `count` samples. Raises as `Packer.take`."""
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
    """Return where sequences and documents begin among tokens laid end to end, int64, sorted. If both do, twice."""
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
