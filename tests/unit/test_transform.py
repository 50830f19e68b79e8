from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.extensions.sequences.documents import Encoding, documents_of
from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid, TransformFailed, UnsupportedColumn
from dlac_pipeline.read.samples import samples_of
from dlac_pipeline.rows.transform import ROW, Reject, RowRejected, Transform, load_transform, transform_rows

EXAMPLES = settings(max_examples=100, deadline=None)
DOUBLED = "def double(batch):\n    return batch.set_column(0, 'x', [2 * x.as_py() for x in batch['x']])\n"


def transform(function: Callable[[pa.RecordBatch], Any]) -> Transform:
    """Return a function as a transform."""
    return Transform("tests:f", "digest", function)


def numbers(values: list[float]) -> pa.Table:
    """Return a table with one column x."""
    return pa.table({"x": pa.array(values)})


def repeated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Repeat every row x times. 0 drops it, and a negative number raises."""
    counts = batch["x"].to_numpy()
    if (counts < 0).any():
        raise ValueError("below zero")
    return batch.take(pa.array(np.repeat(np.arange(len(batch)), counts)))


def run(
    function: Callable[[pa.RecordBatch], Any], live: pa.Table, *, reject: Reject = "fail", check: bool = False
) -> Any:
    """Transform rows at positions 10, 13, 16, ..."""
    return transform_rows(transform(function), live, 10 + 3 * np.arange(live.num_rows), reject=reject, check=check)


def test_function_is_bound_by_its_source(tmp_path: Path) -> None:
    """The digest covers the file's bytes and the function's name, and ignores the file's path."""
    (tmp_path / "a.py").write_text(DOUBLED)
    (tmp_path / "b.py").write_text(DOUBLED + "# changed\n")
    one, other = (load_transform(f"{tmp_path / name}.py:double") for name in "ab")
    assert one.digest == blake3(DOUBLED.encode() + b"\0double").hexdigest()
    assert one.digest != other.digest
    done = transform_rows(one, numbers([1, 2]), np.arange(2), check=True)
    assert done.table.to_pydict() == {"x": [2, 4]}
    assert done.row.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp}/raises.py:f", "ZeroDivisionError"),
        ("{tmp}/a.py:f", "expected a function 'f' in '.*a.py', found None"),
        ("sys:intern", "expected the source file"),
    ],
)
def test_unloadable_function_is_named(tmp_path: Path, name: str, message: str) -> None:
    """The error for a wrong name or file names the expected and the found value."""
    (tmp_path / "a.py").write_text(DOUBLED)
    (tmp_path / "raises.py").write_text("1 / 0")
    with pytest.raises(TransformFailed, match=message):
        load_transform(name.format(tmp=tmp_path))


@EXAMPLES
@given(st.lists(st.integers(-1, 3), max_size=40), st.integers(1, 10))
def test_rows_are_mapped_or_quarantined(counts: list[int], chunk: int) -> None:
    """Every row gives its number of rows. Rows that raise are named, for any chunks of the table."""
    pieces = [counts[i : i + chunk] for i in range(0, len(counts), chunk)]
    done = run(repeated, pa.table({"x": pa.chunked_array(pieces, pa.int64())}), reject="quarantine", check=True)
    good = [(row, x) for row, x in enumerate(counts) if x >= 0]
    assert done.row.tolist() == [row for row, x in good for _ in range(x)]
    if good:
        assert done.table["x"].to_pylist() == [x for _, x in good for _ in range(x)]
    assert done.rejected == tuple((10 + 3 * row, "ValueError: below zero") for row, x in enumerate(counts) if x < 0)


@EXAMPLES
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=40))
def test_every_row_is_counted_once(counts: list[int]) -> None:
    """A block's row positions are in exactly one list: sampled, filtered or quarantined."""
    positions = 10 + 3 * np.arange(len(counts))
    samples = samples_of(numbers(list(counts)), positions, transform=transform(repeated), reject="quarantine", first={})
    where = dict(zip(positions.tolist(), counts, strict=True))
    assert samples.rows.positions.tolist() == [at for at, x in where.items() if x > 0]
    assert np.diff(samples.rows.ends, prepend=0).tolist() == [x for x in counts if x > 0]
    assert samples.rows.filtered.tolist() == [at for at, x in where.items() if x == 0]
    assert [at for at, _ in samples.rows.quarantined] == [at for at, x in where.items() if x < 0]
    if samples.rows.items:
        assert samples.columns["x"].tolist() == [x for x in counts for _ in range(x)]


def test_rejected_row_fails_with_position() -> None:
    """By default the first row that the function raises for is an error with the row's position and the reason."""
    with pytest.raises(RowRejected, match="ValueError: below zero for the row at position 16") as caught:
        run(repeated, numbers([1, 2, -1, 0, -1]))
    assert caught.value.position == 16
    assert isinstance(caught.value.__cause__, ValueError)


def test_memory_error_rejects_no_row() -> None:
    """MemoryError proves nothing about rows, and is passed on."""
    with pytest.raises(MemoryError):
        run(Mock(side_effect=MemoryError), numbers([1, 2]), reject="quarantine")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda batch: batch if len(batch) < 2 else int("too many"),
            "ValueError: .*too many' for 2 rows together and for no part of them",
        ),
        (
            lambda batch: batch.set_column(0, "x", pc.subtract(batch["x"], pc.mean(batch["x"]))),
            "other results for two halves",
        ),
        (lambda batch: batch.slice(1).drop_columns([ROW]), "return 4 rows for 4, or their 'dlac_row', found 3 rows"),
        (lambda batch: batch.take(pa.array([1, 0])), r"non-decreasing order within 0..3, found \[1, 0\]"),
    ],
)
@pytest.mark.parametrize("reject", ["fail", "quarantine"])
def test_broken_contract_is_always_error(
    function: Callable[[pa.RecordBatch], Any], message: str, reject: Reject
) -> None:
    """An error of the function is never taken for bad rows."""
    with pytest.raises(TransformFailed, match=message):
        run(function, numbers([1.0, 2.0, 4.0, 9.0]), reject=reject, check=True)


_VECTORS = pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int16(), 2))


def returned(column: pa.Array) -> Any:
    """Return the samples of a transform that returns a column."""
    live = pa.table({"x": range(len(column))})
    made = transform(lambda batch: pa.record_batch({"v": column, ROW: batch[ROW]}))
    return samples_of(live, np.arange(len(column)), transform=made, first={}).columns["v"]


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        (_VECTORS.slice(1, 2), np.int16),
        (pa.array([[[1], [2]], [[3], [4]]], pa.list_(pa.large_list(pa.uint8()))).slice(1), np.uint8),
        (pa.array([[[], []], [[], []]], pa.list_(pa.list_(pa.int32()))), np.int32),
        (pa.array([7, 8]).dictionary_encode(), np.int64),
    ],
)
def test_lists_become_dimensions(column: pa.Array, dtype: type) -> None:
    """Lists of one length, nested or not, become one dimension for each level, also of a slice."""
    found = returned(column)
    assert found.dtype == dtype
    assert found.tolist() == column.to_pylist()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([{"a": 1}] * 2), "values of type struct"),
        (pa.array([[[1, 2]], [None]], pa.list_(pa.list_(pa.int32(), 2), 1)), "1 nulls in it"),
        (pa.array([[1], [2, 3]]), "lists of 1 to 2 items"),
    ],
)
def test_unfit_result_is_named(column: pa.Array, message: str) -> None:
    """What cannot become a tensor is refused, with the column and the transform."""
    with pytest.raises(
        UnsupportedColumn, match=f"column 'v' of transform 'tests:f' to become a tensor, found {message}"
    ):
        returned(column)


@pytest.mark.parametrize("other", [[1.5], [[1]], [1]])
def test_blocks_with_other_kinds_are_refused(other: list[Any]) -> None:
    """A later block with another type or length, or another column, is refused, as its numbers would be cut or fail."""
    made = transform(lambda batch: batch.drop_columns([ROW]))
    first: dict[str, Any] = {}
    samples_of(pa.table({"x": [1]}), np.arange(1), transform=made, first=first)
    name = "y" if other == [1] else "x"
    with pytest.raises(UnsupportedColumn, match="the same types and lengths from transform 'tests:f'"):
        samples_of(pa.table({name: other}), np.arange(1), transform=made, first=first)


def test_transform_makes_documents() -> None:
    """One row becomes several documents, each with its frame. A row with only empty documents is filtered."""

    def lists(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [row for row, x in enumerate(batch["x"].to_pylist()) for _ in range(2)]
        tokens = [[7] * (x - i) for x in batch["x"].to_pylist() for i in range(2)]
        return pa.record_batch({"t": pa.array(tokens, pa.large_list(pa.uint16())), ROW: pa.array(rows, pa.int64())})

    made, encoding = transform(lists), Encoding(begin_id=1, end_id=2)
    positions = np.array([4, 9])
    documents = documents_of(numbers([1, 2]), positions, column="t", transform=made, encoding=encoding, check=True)
    assert documents.values.tolist() == [1, 7, 2, 1, 7, 7, 2, 1, 7, 2]
    assert documents.values.dtype == np.int32
    assert documents.ends.tolist() == [3, 7, 10]
    assert documents.rows.positions.tolist() == [4, 9]
    assert documents.rows.ends.tolist() == [3, 10]


@pytest.mark.parametrize("kind", [pa.list_(pa.int8()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 2)])
@pytest.mark.parametrize("chunked", [True, False])
def test_lists_of_any_integers_are_tokens(kind: pa.DataType, chunked: bool) -> None:
    """Chunks, offsets and widths do not matter. An empty list is filtered and gets no frame."""
    rows: list[list[int]] = [[9, 9], [1, 2], [3, 4], [5, 6]]
    if not pa.types.is_fixed_size_list(kind):
        rows += [[], [8]]
    whole = pa.array(rows, kind)
    array = pa.chunked_array([whole.slice(1, 2), whole.slice(3)] if chunked else [whole.slice(1)])
    documents = documents_of(pa.table({"t": array}), np.arange(len(array)), column="t", encoding=Encoding(end_id=0))
    kept = [[*row, 0] for row in rows[1:] if row]
    assert documents.values.tolist() == [token for row in kept for token in row]
    assert np.diff(documents.rows.ends, prepend=0).tolist() == [len(row) for row in kept]
    assert documents.rows.filtered.tolist() == [at for at, row in enumerate(rows[1:]) if not row]
    assert documents.nbytes > 0


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        (pa.array([[1], None]), UnsupportedColumn, "no nulls in column 't', found 1"),
        (pa.array([[1], [None]]), UnsupportedColumn, "no nulls inside the lists of column 't', found 1"),
        (pa.array(["a", "b"]), SpecInvalid, "expected a tokenizer for column 't'"),
    ],
)
def test_columns_without_tokens_are_refused(column: pa.Array, error: type[Exception], message: str) -> None:
    """Nulls, other types, and texts without a tokenizer are errors that name the column."""
    with pytest.raises(error, match=message):
        documents_of(pa.table({"t": column}), np.arange(2), column="t")
    with pytest.raises(NoSuchColumn, match=r"columns \['t'\] in sequences.column, .*found 'u'"):
        documents_of(pa.table({"t": column}), np.arange(2), column="u")
