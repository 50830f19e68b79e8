"""Documents of one key group's blocks in, sequences of T tokens out."""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from dlac_pipeline.extensions.sequences.documents import Documents, Encoding, documents_of
from dlac_pipeline.extensions.sequences.tokenizing import Tokenizer
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.legs.leg import LegSequences
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.line import Piece
from dlac_pipeline.read.packing import BEGINNING, ItemLine, join_pieces
from dlac_pipeline.rows.columns import Array
from dlac_pipeline.rows.transform import Reject, Transform


class DocumentPacking:
    """Packing of the documents of a leg into its sequences."""

    def __init__(self, sequences: LegSequences, tokenizer: Tokenizer | None) -> None:
        self._sequences = sequences
        self._encoding = Encoding(tokenizer=tokenizer, begin_id=sequences.begin_id, end_id=sequences.end_id)

    def prepare(
        self,
        live: pa.Table,
        positions: Ints,
        *,
        column: str,
        transform: Transform | None,
        reject: Reject,
        check: bool,
    ) -> Documents:
        """Return the documents of a block's live rows, as `documents_of`."""
        return documents_of(
            live, positions, column=column, transform=transform, encoding=self._encoding, reject=reject, check=check
        )

    def line(
        self, blocks: Iterable[tuple[int, int, Documents]], *, start: Cursor, drain: bool, close: Callable[[], None]
    ) -> "Packer":
        """Return the line of the sequences of blocks."""
        length, pad_id = self._sequences.length, self._sequences.pad_id
        return Packer(blocks, length=length, start=start, drain=drain, pad_id=pad_id, close=close)


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
        tokens = join_pieces([content.values[first:stop] for content, first, stop in pieces])
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
