"""Streams of items: documents of one key group's blocks in, sequences of T tokens out, or, without packing, samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic

import numpy as np

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.documents import Documents, Samples
from dlac_pipeline.read.line import BlockAdvance, Content, Line, Piece, merge
from dlac_pipeline.read.streams import Given, RowStream
from dlac_pipeline.rows.columns import Array, Column

BEGINNING = Cursor()


class ItemLine(ABC, Generic[Content]):
    """Stream of items of one key group and source, from the cursor `start` on, laid out `length` at a time.

    At the end of the line the last rest that is shorter than `length` is given too (`drain`), or stays pending after the
    cursor. The result does not depend on where the line was resumed or how many were taken at a time.
    """

    ready_rows = 0
    """The samples of a block are not known before they are laid out."""

    def __init__(
        self,
        blocks: Iterable[tuple[int, int, Content]],
        *,
        length: int = 1,
        start: Cursor = BEGINNING,
        drain: bool = True,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`close` releases the blocks."""
        self._line = Line(blocks, start)
        self._length = length
        self._drain = drain
        self.close = close

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

    def take(self, count: int, low: int, high: int) -> Given:
        """Pass up to `count` samples, and give those from the `low`-th to before the `high`-th of them, laid end to end.

        Raises `CursorMismatch` if the first block does not continue where the line was to be resumed.
        """
        parts = [self._pass(each) for each in (low, high - low, count - high)]
        items, contents, _ = parts[1]
        columns = {name: Column(array) for name, array in self._columns(contents, items).items()} if items else {}
        return Given(
            count=sum(-(-passed // self._length) for passed, _, _ in parts),
            items=items,
            pieces=[(columns, np.arange(-(-items // self._length)))] if items else [],
            advances=merge(advance for _, _, advances in parts for advance in advances),
        )

    def _pass(self, count: int) -> tuple[int, list[Piece[Content]], list[BlockAdvance]]:
        """Pass up to this many samples. Return the number of their items, the items, and the advances."""
        wanted = count * self._length
        items = min(wanted, self._line.fill(wanted))
        if not self._drain:
            items -= items % self._length
        return items, *self._line.take(items)

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
        close: Callable[[], None] = lambda: None,
    ) -> None:
        if length < 1:
            raise SpecInvalid(f"expected sequences of at least 1 token, found length {length!r}")
        super().__init__(blocks, length=length, start=start, drain=drain, close=close)
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

    def _columns(self, pieces: list[Piece[Samples]], items: int) -> dict[str, Array]:
        names = pieces[0][0].columns if pieces else ()
        return {name: _end_to_end([each.columns[name][low:high] for each, low, high in pieces]) for name in names}


Stream = RowStream | ItemLine[Documents] | ItemLine[Samples]
"""Samples of a key group from a source."""


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
