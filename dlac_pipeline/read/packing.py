"""Packing: documents of one key group's blocks in, sequences of T tokens out, or, without packing, samples."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

import numpy as np

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.documents import Documents, Samples
from dlac_pipeline.read.line import BlockAdvance, Content, Line, Piece
from dlac_pipeline.rows.columns import Array

BEGINNING = Cursor()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """Result of one call. `cursor` is where the line resumes."""

    count: int
    """Sequences or samples, fewer than requested at the end of the line."""
    items: int
    cursor: Cursor
    advances: list[BlockAdvance]
    columns: dict[str, Array]
    """Column -> [count] or [count, length]. No columns where nothing is laid out."""


class ItemLine(ABC, Generic[Content]):
    """Items of one key group and source, from the cursor `start` on, laid out `length` at a time.

    At the end of the line the last rest that is shorter than `length` is given too (`drain`), or stays pending after the
    cursor. The result does not depend on where the line was resumed or how many were taken at a time.
    """

    def __init__(
        self, blocks: Iterable[tuple[int, int, Content]], *, length: int, start: Cursor = BEGINNING, drain: bool = True
    ) -> None:
        self._line = Line(blocks, start)
        self._length = length
        self._drain = drain

    @property
    def cursor(self) -> Cursor:
        """The cursor directly after the last item taken."""
        return self._line.cursor

    @property
    def exhausted(self) -> bool:
        """True if nothing can follow. Waits for the next block where that decides."""
        need = 1 if self._drain else self._length
        ready = self._line.fill(need)
        return ready < need and (ready > 0 or self._line.done)

    def take(self, count: int, *, lay_out: bool = True) -> Taken:
        """Return up to `count` sequences or samples, or only pass over them without columns (`lay_out`).

        Raises `CursorMismatch` if the first block does not continue where the line was to be resumed.
        """
        wanted = count * self._length
        items = min(wanted, self._line.fill(wanted))
        if not self._drain:
            items -= items % self._length
        pieces, advances = self._line.take(items)
        return Taken(
            count=-(-items // self._length),
            items=items,
            cursor=self.cursor,
            advances=advances,
            columns=self._columns(pieces, items) if lay_out else {},
        )

    @abstractmethod
    def _columns(self, pieces: list[Piece[Content]], items: int) -> dict[str, Array]:
        """Lay pieces end to end."""


class Packer(ItemLine[Documents]):
    """Sequences of `length` tokens. The last one may be filled up with `pad_id`.

    The first block contains the rows of block `start` from `start.position` on: a row that was read in part is given whole
    again. Each column is [count, length]:

    tokens: the token ids, and `pad_id` in padding.
    document: 1, 2, 3, ... within each sequence, 0 for padding. Tokens attend to tokens of their own document only.
    position: restarts at 0 with each document, and with each sequence: the beginning of a document that is continued from
        the sequence before cannot be attended to any more.
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
        super().__init__(blocks, length=length, start=start, drain=drain)
        self._pad_id = pad_id

    def _columns(self, pieces: list[Piece[Documents]], items: int) -> dict[str, Array]:
        shape = (-(-items // self._length), self._length)
        if not pieces:
            return {name: np.zeros(shape, np.int32) for name in ("tokens", "document", "position")}
        tokens = _end_to_end([content.values[first:stop] for content, first, stop in pieces])
        starts = _starts(pieces, items, self._length)
        lengths = np.append(starts[1:], items) - starts
        # Where a document begins with a sequence there are two starts; the first one has no length, and the number 0.
        first = starts.searchsorted(starts - starts % self._length, side="right") - 1
        number = (np.arange(1, len(starts) + 1) - first).astype(np.int32)
        position = np.arange(items, dtype=np.int32) - starts.astype(np.int32).repeat(lengths)
        return {
            "tokens": _shaped(tokens, shape, self._pad_id),
            "document": _shaped(number.repeat(lengths), shape, 0),
            "position": _shaped(position, shape, 0),
        }


class Sampler(ItemLine[Samples]):
    """Samples without packing."""

    def __init__(self, blocks: Iterable[tuple[int, int, Samples]], *, start: Cursor = BEGINNING) -> None:
        super().__init__(blocks, length=1, start=start)

    def _columns(self, pieces: list[Piece[Samples]], items: int) -> dict[str, Array]:
        names = pieces[0][0].columns if pieces else ()
        return {name: _end_to_end([each.columns[name][low:high] for each, low, high in pieces]) for name in names}


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
