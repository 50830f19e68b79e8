"""Documents and a tokenizer in, one line of tokens cut into sequences out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Tokenizer

from examples.corpus.tokenizer import END_OF_DOCUMENT

_DOCUMENTS_AT_ONCE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """A line of tokens in sequences of one length. The last one is filled up with end-of-document tokens."""

    ids: npt.NDArray[np.int32]
    """[sequences, length]"""
    first_document: npt.NDArray[np.int64]
    """[sequences]: position of the document that a sequence's first token belongs to."""
    tokens: int
    """Tokens of the line, without what fills up the last sequence."""

    def rows(self, first: int, end: int) -> pa.Table:
        """Sequences first..end-1 as Arrow rows over the same buffers."""
        length = self.ids.shape[1]
        offsets = np.arange(end - first + 1, dtype=np.int32) * np.int32(length)
        return pa.table(
            {
                "sequence_id": np.arange(first, end, dtype=np.int64),
                "tokens": pa.ListArray.from_arrays(offsets, self.ids[first:end].reshape(-1)),
                "first_document": self.first_document[first:end],
            }
        )


def lay_out(tokenizer: Tokenizer, documents: Sequence[str], length: int) -> Sequences:
    """Encode the documents, end each with a token, lay them end to end, and cut the line into sequences."""
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    encoded = list(_encode(tokenizer, documents))
    starts = np.cumsum([0, *(len(ids) + 1 for ids in encoded)])
    tokens = int(starts[-1])
    line = np.full(-(-tokens // length) * length, end, dtype=np.int32)
    for start, ids in zip(starts, encoded, strict=False):  # the array is filled with end tokens
        line[start : start + len(ids)] = ids
    firsts = np.arange(0, len(line), length)
    owners = np.searchsorted(starts[:-1], firsts, side="right") - 1
    return Sequences(ids=line.reshape(-1, length), first_document=owners.astype(np.int64), tokens=tokens)


def _encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Iterator[npt.NDArray[np.int32]]:
    for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        batch = list(documents[first : first + _DOCUMENTS_AT_ONCE])
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int32)
