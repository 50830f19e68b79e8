"""The tables of the contract: the columns of a row, computed from its id, and the items that a reader must return."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.contract.contract import PER_ROW, Reading, ragged
from tests.contract.runs import GlobalBatch, Tensors

TRANSFORMS = f"""
import pyarrow as pa
import pyarrow.compute as pc

def several(batch):
    rows = [row for row, row_id in zip(batch["dlac_row"].to_pylist(), batch["row_id"].to_pylist()) for _ in range(row_id % 4)]
    ids = pc.take(batch["row_id"], pa.array(rows, pa.int64()))
    copies = [copy for row_id in batch["row_id"].to_pylist() for copy in range(row_id % 4)]
    item = pc.add(pc.multiply(ids, {PER_ROW}), pa.array(copies, pa.int64()))
    return pa.RecordBatch.from_pydict({{"item": item, "row_id": ids, "dlac_row": pa.array(rows, pa.int64())}})

def documents(batch):
    rows, texts = [], []
    for row, row_id, tokens in zip(*(batch[name].to_pylist() for name in ("dlac_row", "row_id", "tokens"))):
        cuts = [len(tokens) * part // (row_id % 3) for part in range(row_id % 3 + 1)] if row_id % 3 else []
        for low, high in zip(cuts, cuts[1:]):
            rows.append(row)
            texts.append(tokens[low:high])
    columns = {{"tokens": pa.array(texts, pa.list_(pa.int32())), "dlac_row": pa.array(rows, pa.int64())}}
    return pa.RecordBatch.from_pydict(columns)
"""
"""`several` returns a row row_id % 4 times. `documents` drops every third row, and halves the tokens of others."""


def _ids(ids: Sequence[int]) -> Any:
    return np.array(ids, dtype=np.int64)


def _same(batch: GlobalBatch, name: str, expected: Any) -> None:
    found = batch.tensors[name]
    assert found.dtype == expected.dtype
    assert np.array_equal(found[batch.valid], expected)
    assert not found[~batch.valid].any(), "empty slots are zeros"


def _x_of(ids: Any) -> Any:
    return (ids[:, None] * np.array([1.0, -1.0, 0.5])).astype(np.float32)


def _list_rows(ids: Sequence[int]) -> pa.Table:
    x = pa.array(list(_x_of(_ids(ids))), pa.list_(pa.float32()))
    return pa.table({"row_id": _ids(ids), "x": x, "kept": _ids(ids) % 3 != 0})


def _check_lists(batch: GlobalBatch) -> None:
    _same(batch, "x", _x_of(batch.tensors["row_id"][batch.valid]))


LISTS = Reading(rows=_list_rows, columns=("row_id", "x"), check=_check_lists)


def _scalar_rows(ids: Sequence[int]) -> pa.Table:
    numbers = _ids(ids)
    key = pa.array([int(row).to_bytes(6, "big") for row in ids], pa.binary(6))
    day = pc.cast(pa.array(numbers.astype(np.int32)), pa.date32())
    return pa.table({"row_id": numbers, "key": key, "half": numbers / 2, "even": numbers % 2 == 0, "day": day})


def _check_scalars(batch: GlobalBatch) -> None:
    ids = batch.tensors["row_id"][batch.valid]
    keys = [list(int(row).to_bytes(6, "big")) for row in ids]
    _same(batch, "key", np.array(keys, dtype=np.uint8).reshape(len(ids), 6))
    _same(batch, "half", ids / 2)
    _same(batch, "even", ids % 2 == 0)
    _same(batch, "day", ids)


SCALARS = Reading(rows=_scalar_rows, columns=("row_id", "key", "half", "even", "day"), check=_check_scalars)


def _text(row: int) -> str:
    return f"row {row} " + "ü" * (row % 5) if row % 7 else ""


def _text_rows(ids: Sequence[int]) -> pa.Table:
    parts = pa.array([list(range(row % 6)) for row in ids], pa.list_(pa.int32()))
    return pa.table({"row_id": _ids(ids), "text": [_text(row) for row in ids], "parts": parts})


def _check_texts(batch: GlobalBatch) -> None:
    for slot, row in enumerate(batch.tensors["row_id"].tolist()):
        there = bool(batch.valid[slot])
        assert bytes(ragged(batch.tensors, "text", slot)).decode() == (_text(row) if there else "")
        assert ragged(batch.tensors, "parts", slot).tolist() == (list(range(row % 6)) if there else [])


TEXTS = Reading(rows=_text_rows, columns=("row_id", "text", "parts"), source={"ragged": ["parts"]}, check=_check_texts)


def _nullable_rows(ids: Sequence[int]) -> pa.Table:
    texts = pa.array([None if row % 3 == 0 else _text(row) for row in ids], pa.string())
    score = pa.array([None if row % 4 == 1 else row * 2 for row in ids], pa.int32())
    pair = pa.array([None if row % 5 == 2 else [row, -row] for row in ids], pa.list_(pa.int64()))
    return pa.table({"row_id": _ids(ids), "text": texts, "score": score, "pair": pair})


def _check_nullable(batch: GlobalBatch) -> None:
    ids = batch.tensors["row_id"][batch.valid]
    _same(batch, "score", np.where(ids % 4 == 1, 0, ids * 2).astype(np.int32))
    _same(batch, "score.valid", ids % 4 != 1)
    _same(batch, "pair", np.where((ids % 5 == 2)[:, None], 0, ids[:, None] * np.array([1, -1])))
    _same(batch, "pair.valid", ids % 5 != 2)
    _same(batch, "text.valid", ids % 3 != 0)
    for slot, row in enumerate(batch.tensors["row_id"].tolist()):
        there = batch.valid[slot] and row % 3
        assert bytes(ragged(batch.tensors, "text", slot)).decode() == (_text(row) if there else "")


NULLABLE = Reading(
    rows=_nullable_rows,
    columns=("row_id", "text", "score", "pair"),
    source={"nullable": ["text", "score", "pair"]},
    check=_check_nullable,
)


def tokens_of(row: int) -> list[int]:
    """Return the tokens of a row: none, or up to 21 that encode the row and their position in it."""
    return [row * PER_ROW + place for place in range(row * 7 % 22)]


def _token_rows(ids: Sequence[int]) -> pa.Table:
    tokens = pa.array([tokens_of(row) for row in ids], pa.list_(pa.int32()))
    return pa.table({"row_id": _ids(ids), "tokens": tokens, "kept": _ids(ids) % 3 != 0})


def packed_slot(tensors: Tensors, slot: int) -> list[int]:
    """Return the tokens of a sequence, without its padding."""
    tokens: list[int] = tensors["tokens"][slot][tensors["document"][slot] > 0].tolist()
    return tokens


def check_packed(batch: GlobalBatch) -> None:
    """Check that padding is at the end, document numbers grow with each new document, and positions count within it."""
    for tokens, document, position in zip(
        *(batch.tensors[name] for name in ("tokens", "document", "position")), strict=True
    ):
        filled = int((document > 0).sum())
        assert (document[:filled] > 0).all()
        assert not tokens[filled:].any()
        begins = np.flatnonzero(np.diff(document[:filled], prepend=0))
        assert document[:filled][begins].tolist() == list(range(1, len(begins) + 1))
        starts = np.repeat(begins, np.diff(np.append(begins, filled)))
        assert position[:filled].tolist() == (np.arange(filled) - starts).tolist()


_IN_SEQUENCES: dict[str, Any] = {"found": packed_slot, "check": check_packed}
PACKED = Reading(rows=_token_rows, columns=("tokens",), given=tokens_of, sequences={"length": 12}, **_IN_SEQUENCES)


def _word_rows(ids: Sequence[int]) -> pa.Table:
    return pa.table({"row_id": _ids(ids), "text": [" ".join(f"w{token}" for token in tokens_of(row)) for row in ids]})


def tokenized(folder: Path) -> Reading:
    """Return packed texts, with a tokenizer whose words are numbers."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(400 * PER_ROW)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    sequences = {"length": 9, "tokenizer": str(path)}
    return Reading(rows=_word_rows, columns=("text",), given=tokens_of, sequences=sequences, **_IN_SEQUENCES)


def _transform(folder: Path, function: str) -> str:
    path = folder / "transforms.py"
    path.write_text(TRANSFORMS)
    return f"{path}:{function}"


def _several(row: int) -> list[int]:
    return [row * PER_ROW + copy for copy in range(row % 4)]


def _by_item(tensors: Tensors, slot: int) -> list[int]:
    return [int(tensors["item"][slot])]


def transformed(folder: Path) -> Reading:
    """Return a transform that drops some rows and repeats others."""
    source = {"transform": _transform(folder, "several")}
    return Reading(rows=_list_rows, columns=("row_id", "x"), given=_several, found=_by_item, source=source)


def _halved(row: int) -> list[int]:
    return tokens_of(row) if row % 3 else []


def transformed_packed(folder: Path) -> Reading:
    """Return a transform that drops some rows, and makes two documents of others, which are packed."""
    source, sequences = {"transform": _transform(folder, "documents")}, {"length": 10, "column": "tokens"}
    columns = ("row_id", "tokens")
    return Reading(
        rows=_token_rows, columns=columns, given=_halved, source=source, sequences=sequences, **_IN_SEQUENCES
    )
