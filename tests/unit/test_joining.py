"""Tables laid end to end or in another order: their rows, in one array each where the types allow."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.read import layout
from dlac_pipeline.read.joining import end_to_end, join_columns
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.rows.columns import ColumnKind, of_one_shape, to_column

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
    if expected:
        apart = join_columns(iter(parts), len(expected), Buffers(), wide_bytes=data.draw(st.sampled_from([1, 20])))["c"]
        order = data.draw(st.permutations(range(len(expected))))
        plain = [one.encode() if isinstance(one, str) else one for one in expected]
        plain = [[*one] if isinstance(one, bytes) else one for one in plain]
        assert laid_out(apart, np.array(order), name) == [plain[row] for row in order]


def laid_out(parts: list[pa.ChunkedArray], rows: npt.NDArray[np.int64], name: str) -> list[Any]:
    """Return rows of a column as they are laid out in segments of a few bytes. Nulls are None."""
    items = {"number": np.int64, "pair": np.int32, "tokens": np.int32}.get(name, np.uint8)
    ragged = name in ("text", "bytes", "tokens")
    kind = ColumnKind(name="c", items=np.dtype(items), listed=name in ("pair", "tokens"), ragged=ragged, nullable=True)
    columns = of_one_shape(
        [to_column(part, kind, origin="here") for part in parts], [None for _ in parts], kind, "here"
    )
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_SEGMENT_BYTES", 40)
        patch.setattr(layout, "_WINDOW_BYTES", 16)
        segments = [*layout.lay_out({"c": columns}, rows, 3, Buffers())]
    for segment in segments:
        assert segment.start == 3 + len(found)
        column = segment.columns["c"]
        assert column.valid is not None
        values = column.values if column.offsets is None else np.split(column.values, column.offsets[1:-1])
        found += [value.tolist() if here else None for value, here in zip(values, column.valid, strict=True)]
        assert segment.stop == 3 + len(found)
    return found


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
