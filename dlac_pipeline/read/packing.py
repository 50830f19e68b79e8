"""Streams of items: samples of one key group's blocks. Through a door, documents in and sequences of T tokens out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.plan.legs.choice import LegTokenizer
from dlac_pipeline.plan.legs.leg import LegSequences
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.line import BlockAdvance, Content, Line, Piece, merge
from dlac_pipeline.read.samples import Items, Samples
from dlac_pipeline.read.streams import Given, RowStream
from dlac_pipeline.rows.columns import Array, Column
from dlac_pipeline.rows.transform import Reject, Transform

PACKINGS = Door("dlac.packings", "packing")
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


class Sampler(ItemLine[Samples]):
    """Samples without packing."""

    def _columns(self, pieces: list[Piece[Samples]], items: int) -> dict[str, Array]:
        names = pieces[0][0].columns if pieces else ()
        return {name: join_pieces([each.columns[name][low:high] for each, low, high in pieces]) for name in names}


class Packing(Protocol):
    """Packing of the documents of a leg. The entry of the door is called with a leg's `LegSequences` and `LegTokenizer`."""

    def prepare(
        self,
        live: pa.Table,
        positions: Ints,
        *,
        column: str,
        transform: Transform | None,
        reject: Reject,
        check: bool,
    ) -> Items:
        """Return the documents of a block's live rows, for `line`. Arguments and errors are as of `samples_of`."""

    def line(
        self, blocks: Iterable[tuple[int, int, Any]], *, start: Cursor, drain: bool, close: Callable[[], None]
    ) -> ItemLine[Any]:
        """Return the line of sequences from the cursor `start` on."""


def open_packing(sequences: LegSequences, tokenizer: LegTokenizer | None) -> Packing:
    """Return the packing of a leg's documents. Raise `BadInput` if no extension packs them."""
    found: Packing = PACKINGS.load("documents", setting="sequences.length")(sequences, tokenizer)
    return found


Stream = RowStream | ItemLine[Any]
"""Samples of a key group from a source."""


def join_pieces(parts: list[Array]) -> Array:
    """Return the pieces of an array as one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
