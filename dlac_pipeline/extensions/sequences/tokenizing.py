"""Tokens of a column of texts or of lists. Texts by any `tokenizers` JSON file or fast tokenizer of transformers.

Texts stay texts: a text that spells out a special token does not become that token, nothing is added around it, and nothing
is truncated or padded, whatever the file defines. The reader adds the tokens that begin and end a document.
"""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3
from tokenizers import Tokenizer as Backend

from dlac_pipeline.lakehouse.errors import TokenizerUnreadable, UnsupportedColumn
from dlac_pipeline.rows.columns import Ints

Tokens = npt.NDArray[np.int32] | npt.NDArray[np.int64]
TEXT_BYTES_AT_ONCE = 2**20
"""Bytes of text per call. The library keeps some hundred bytes per token of an encoded text, until the ids are copied."""


class Tokenizer:
    """A tokenizer that releases the GIL, and whose tokens depend on the text alone. `digest` identifies the results."""

    def __init__(self, backend: Backend, *, name: str, digest: str) -> None:
        # One thread per call: the reader's background threads are the parallelism, they leave the other cores to the
        # training, and the library's own pool would neither survive nor keep silent about a fork (DataLoader workers).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self.name = name
        self.digest = digest

    def encode(self, texts: pa.StringArray | pa.LargeStringArray) -> tuple[Tokens, Ints]:
        """Token ids of all texts, int32, and offsets int64 [texts + 1]."""
        values, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(1, dtype=np.int64)]
        for part in _parts(texts):
            encoded = self._backend.encode_batch_fast(part.to_pylist(), add_special_tokens=False)
            lengths.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            ids = chain.from_iterable(encoding.ids for encoding in encoded)
            values.append(np.fromiter(ids, np.int32, int(lengths[-1].sum())))
        return np.concatenate(values), np.cumsum(np.concatenate(lengths))

    def token_id(self, token: str) -> int:
        """The id of a token by its name. Raises `TokenizerUnreadable` if there is no such token."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise TokenizerUnreadable(
                f"expected a token {token!r} in tokenizer {self.name!r}, found none among its "
                f"{self._backend.get_vocab_size()}: name one of its special tokens"
            )
        return int(found)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a JSON file, or a fast one of transformers by folder or name. Raises `TokenizerUnreadable`."""
    path = Path(name)
    if path.is_file():
        return _from_file(path)
    if path.suffix == ".json":  # the hub has no tokenizer of such a name, and transformers asks it for a minute
        raise TokenizerUnreadable(f"expected a tokenizer's JSON file at {str(name)!r}, found no file: correct the path")
    backend = _from_transformers(str(name))
    return Tokenizer(backend, name=str(name), digest=blake3(backend.to_str(pretty=True).encode()).hexdigest())


def _from_file(path: Path) -> Tokenizer:
    content = path.read_bytes()
    try:
        backend = Backend.from_str(content.decode())
    except Exception as err:  # the library raises bare Exception
        raise TokenizerUnreadable(
            f"expected a JSON file of the tokenizers library at {str(path)!r}, found {err}: name its tokenizer.json"
        ) from err
    return Tokenizer(backend, name=str(path), digest=blake3(content).hexdigest())


def _from_transformers(name: str) -> Backend:
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore] # optional
    except ImportError as err:
        raise TokenizerUnreadable(
            f"expected a tokenizer's JSON file at {name!r}, found no file: correct the path, or install transformers to "
            "load a tokenizer by its name or folder"
        ) from err
    try:
        wrapped: Any = AutoTokenizer.from_pretrained(name)
    except Exception as err:  # any error of the hub, the network or the folder
        raise TokenizerUnreadable(
            f"expected tokenizer {name!r} in transformers, found {err}: correct the name"
        ) from err
    backend = getattr(wrapped, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise TokenizerUnreadable(
            f"expected a fast tokenizer {name!r}, found {type(wrapped).__name__!r}, which encodes in Python: "
            "convert it to a tokenizer.json"
        )
    return Backend.from_str(backend.to_str())  # a copy: its owner may want another truncation


def _parts(texts: pa.StringArray | pa.LargeStringArray) -> Iterator[Any]:
    """The texts in pieces of about 1 MiB, at least one text each."""
    if not len(texts):
        return
    offsets = np.frombuffer(texts.buffers()[1], np.int64 if pa.types.is_large_string(texts.type) else np.int32)
    ends = offsets[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    piece = (ends[1:] - ends[0] - 1) // TEXT_BYTES_AT_ONCE
    cuts = np.flatnonzero(np.diff(piece)) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(texts)], strict=True):
        yield texts.slice(int(start), int(stop - start))


def is_text(column_type: pa.DataType) -> bool:
    """Return True if a column of this type is tokenized."""
    kind = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def tokens_of_lists(lists: pa.ChunkedArray, name: str) -> tuple[Tokens, Ints]:
    """Return tokens of a column of lists of integers, and offsets: a view of the buffers of one chunk of int32 or int64.

    Raises `UnsupportedColumn` if another type, or nulls inside the lists.
    """
    parts = [_list_tokens(chunk, name) for chunk in lists.chunks]
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(offsets) for _, offsets in parts)])
    return np.concatenate([values for values, _ in parts]), np.cumsum(lengths)


def _list_tokens(lists: Any, name: str) -> tuple[Tokens, Ints]:
    kind = lists.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise UnsupportedColumn(
            f"expected column {name!r} to hold texts or lists of integers, found {kind}: "
            "name another column, or convert it in the transform"
        )
    if pa.types.is_fixed_size_list(kind):
        offsets = np.arange(len(lists) + 1, dtype=np.int64) * kind.list_size
        flat = lists.flatten()
    else:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        flat = lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        offsets = offsets - offsets[0]
    if flat.null_count:
        raise UnsupportedColumn(f"expected no nulls inside the lists of column {name!r}, found {flat.null_count}")
    array = flat.to_numpy()
    small = np.can_cast(array.dtype, np.int32)
    return array.astype(np.int32 if small else np.int64, copy=False), offsets
