"""Tables laid end to end: their rows, in one array each where the types allow."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.read.joining import end_to_end
from dlac_pipeline.read.memory import Buffers

_KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "number": (pa.int64(), st.integers(-5, 5)),
    "text": (pa.string(), st.text(max_size=4) | st.text(max_size=3).map(lambda text: 200 * text)),
    "bytes": (pa.large_binary(), st.binary(max_size=4)),
    "pair": (pa.list_(pa.int32()), st.lists(st.integers(-5, 5), min_size=2, max_size=2)),
    "tokens": (pa.list_(pa.int32()), st.lists(st.integers(-5, 5), max_size=3)),
}


@settings(max_examples=50)
@given(st.data())
def test_rows_keep_their_order(data: st.DataObject) -> None:
    """Chunks, slices, empty parts and nulls of any type give the rows of a concatenation. No null: one array of byte strings."""
    name = data.draw(st.sampled_from(sorted(_KINDS)))
    kind, values = _KINDS[name]
    row = values if data.draw(st.booleans()) else values | st.none()
    parts, expected = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        chunks = data.draw(st.lists(st.lists(row, max_size=6), min_size=1, max_size=2))
        column = pa.chunked_array([pa.array(chunk, type=kind) for chunk in chunks], type=kind)
        low = data.draw(st.integers(0, len(column)))
        part = column.slice(low, data.draw(st.integers(0, len(column) - low)))
        parts.append(pa.table({"c": part}))
        expected += part.to_pylist()
    found = end_to_end(iter(parts), len(expected), Buffers())["c"]
    assert found.to_pylist() == expected
    if name in ("text", "bytes", "number") and expected and None not in expected:
        assert (found.num_chunks, found.type) == (1, kind)


@pytest.mark.parametrize(
    "rows", [[None, *map(str, range(10_000))], [[1], *([n] * 3 for n in range(10_000))]], ids=["nulls", "lists"]
)
def test_small_slices_keep_no_others_memory(rows: list[Any]) -> None:
    """Of rows that cannot be copied into one array, a slice does not keep the table that it is a slice of."""
    column = pa.array(rows)
    part = pa.table({"c": column}).slice(0, 100)
    found = end_to_end(iter([part, part]), 200, Buffers())["c"]
    assert found.to_pylist() == 2 * rows[:100]
    assert found.get_total_buffer_size() < column.get_total_buffer_size() / 10
