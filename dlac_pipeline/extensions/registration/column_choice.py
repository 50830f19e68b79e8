"""Columns for a first run. In: kinds and types of a table's columns, and some rows. Out: columns, and why others are left out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from dlac_pipeline.lakehouse.errors import UnsupportedColumn

Kind = Literal["numbers", "times", "tokens", "text", "other"]
Sample = Mapping[str, Any]
"""Arrow arrays of the first rows of a table, by column. Columns that could not be read are missing."""
_TARGET = re.compile(r"labels?|targets?|y|class|outcome", re.IGNORECASE)
_ID = re.compile(r"(.*[_\- ])?(id|key|uuid|guid|index|idx|rowid)|.*[a-z]Id|__index_level_\d+__", re.IGNORECASE)
_TOKENS = ("input_ids", "tokens", "token_ids")
_DOCUMENT_CHARACTERS = 200
"""Mean length of the texts that are documents. Numbers beside them are about the documents."""
_FEW_TOKENS = 8
"""Mean length below which lists of integers are rather tags or boxes than sequences."""
_MOST_CLASSES = 1000
_FEW_ROWS = 20
"""Rows below which increasing numbers may be anything."""
_REASONS: dict[Kind, str] = {"numbers": "a number", "times": "a time", "tokens": "a list", "text": "a text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChoice:
    """Columns of one kind, of numbers with the target last, and why each other column is left out."""

    kind: Kind
    columns: tuple[str, ...]
    left_out: Mapping[str, str]


def choose_columns(kinds: Mapping[str, Kind], types: Mapping[str, str], keys: set[str], sample: Sample) -> ColumnChoice:
    """Return tokens, else documents, else numbers, else a text. Partition `keys` and ids are left out.

    Raises:
        UnsupportedColumn: no column can be trained on.
    """
    ids = {name for name, kind in kinds.items() if kind == "numbers" and _is_id(name, sample)}
    reasons = {name: _REASONS.get(kind, types[name]) for name, kind in kinds.items()}
    reasons |= dict.fromkeys(ids, "looks like an id") | dict.fromkeys(keys, "a partition key")
    kind, columns = _choose({name: kind for name, kind in kinds.items() if name not in keys}, types, ids, sample)
    return ColumnChoice(kind=kind, columns=columns, left_out={n: why for n, why in reasons.items() if n not in columns})


def _choose(
    kinds: Mapping[str, Kind], types: Mapping[str, str], ids: set[str], sample: Sample
) -> tuple[Kind, tuple[str, ...]]:
    tokens, texts, numbers = ([name for name in kinds if kinds[name] == kind] for kind in ("tokens", "text", "numbers"))
    features = [name for name in numbers if name not in ids]
    sequences = [each for each in tokens if each in _TOKENS or _mean_length(each, sample) >= _FEW_TOKENS]
    if sequences:
        return "tokens", (next((name for name in _TOKENS if name in sequences), _largest(sequences, sample)),)
    if texts and (len(features) < 2 or _mean_length(_largest(texts, sample), sample) >= _DOCUMENT_CHARACTERS):
        return "text", (_largest(texts, sample),)
    if numbers:
        return "numbers", _target_last(features or numbers)
    if tokens:
        return "tokens", (_largest(tokens, sample),)
    raise UnsupportedColumn(
        f"expected a column of numbers, of texts or of lists of integers, found only {dict(types)!r}: convert one in the table, "
        "name a partition key with --columns, or write the job file by hand with source.transform"
    )


def check_wanted(kinds: Mapping[str, Kind], wanted: Sequence[str]) -> ColumnChoice:
    """Return the wanted columns. Raise `UnsupportedColumn` if no script is generated for them."""
    found = {kinds[name] for name in wanted}
    left_out = {name: "not named" for name in kinds if name not in wanted}
    if found <= {"numbers", "times"}:
        return ColumnChoice(kind="numbers", columns=tuple(wanted), left_out=left_out)
    if len(wanted) == 1 and "other" not in found:
        return ColumnChoice(kind=found.pop(), columns=tuple(wanted), left_out=left_out)
    raise UnsupportedColumn(
        f"expected columns of numbers or times, or one column of texts or of lists of integers, found {list(wanted)!r}: name "
        "such columns, or write the job file by hand, which takes more types"
    )


def count_classes(target: str, kind: pa.DataType | None, bounds: tuple[Any, Any] | None, sample: Sample) -> int:
    """Return the number of classes of a target, or 0 for a quantity. `bounds` are the least and the largest value, if known."""
    if kind is not None and pa.types.is_boolean(kind):
        return 2
    if bounds is None or not 0 <= bounds[0] <= bounds[1]:
        return 0
    values = set(sample[target].drop_null().to_pylist()) if target in sample else set()
    if bounds[1] <= 1 and values and values <= {0, 1}:
        return 2
    whole = kind is not None and pa.types.is_integer(kind)
    return int(bounds[1]) + 1 if whole and _TARGET.fullmatch(target) and bounds[1] < _MOST_CLASSES else 0


def _is_id(name: str, sample: Sample) -> bool:
    """Return True for a name such as user_id, and for whole numbers that only grow."""
    if _ID.fullmatch(name):
        return True
    values = sample.get(name)
    if values is None or len(values) < _FEW_ROWS or values.null_count or not pa.types.is_integer(values.type):
        return False
    return bool(pc.all(pc.greater(values[1:], values[:-1])).as_py())


def _target_last(names: Sequence[str]) -> tuple[str, ...]:
    target = next((name for name in names if _TARGET.fullmatch(name)), names[-1])
    return (*(name for name in names if name != target), target)


def _largest(names: Sequence[str], sample: Sample) -> str:
    return max(names, key=lambda name: _mean_length(name, sample))


def _mean_length(name: str, sample: Sample) -> float:
    """Return the mean number of characters of texts, or of elements of lists. 0 if they could not be read."""
    values = sample.get(name)
    if values is None:
        return 0.0
    is_list = pa.types.is_nested(values.type)
    lengths = pc.list_value_length(values) if is_list else pc.utf8_length(values.cast(pa.large_string()))
    return float(pc.mean(lengths).as_py() or 0.0)
