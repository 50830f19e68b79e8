"""Columns of data files as the schema of their table has them."""

import datetime as dt
import io
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg import types as ice
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import NameMapping

from dlac_pipeline.lakehouse.errors import NoSuchColumn, UnsupportedColumn
from dlac_pipeline.lakehouse.files.parquet import ParquetFooter
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, arrow_type, concat_chunks


def optional(field_id: int, name: str, kind: ice.IcebergType, **more: Any) -> ice.NestedField:
    """Return an optional field."""
    return ice.NestedField(field_id, name, kind, required=False, **more)


def parquet(table: pa.Table, schema: Schema | None = None) -> pq.ParquetFile:
    """Return the rows as a Parquet file, with the field ids of `schema` if it is given."""
    stream = io.BytesIO()
    pq.write_table(table if schema is None else table.cast(schema_to_pyarrow(schema)), stream, row_group_size=3)
    return pq.ParquetFile(stream)


def read(file: pq.ParquetFile, schema: Schema, *names: str, **options: Any) -> pa.Table:
    """Return the named columns of all rows. A reader reads only the columns of `in_file`."""
    columns = FileColumns.of(file.schema_arrow, schema, names or [field.name for field in schema.fields], **options)
    return columns.align(file.read(columns=columns.in_file), file.metadata.num_rows)


OLD = Schema(
    optional(1, "a", ice.IntegerType()),
    optional(2, "b", ice.StringType()),
    optional(3, "c", ice.FloatType()),
    optional(4, "d", ice.BinaryType()),
)
INTEGERS, REALS = pa.array([1, None], pa.int32()), pa.array([0.5, None], pa.float32())
ROWS = pa.table({"a": INTEGERS, "b": ["x", None], "c": REALS, "d": [b"\0", None]})


def test_file_without_ids_uses_name_mapping() -> None:
    """A name mapping decides, even an empty one. Without a mapping the schema's names decide."""
    schema = Schema(optional(1, "a", ice.LongType()), optional(2, "b", ice.StringType()))
    file = parquet(pa.table({"a": [1], "old_b": ["x"], "b": ["not this"]}))
    mapping = NameMapping.model_validate(
        [{"field-id": 1, "names": ["a"]}, {"field-id": 2, "names": ["older_b", "old_b"]}]
    )
    assert read(file, schema, name_mapping=mapping).to_pylist() == [{"a": 1, "b": "x"}]
    assert read(file, schema, name_mapping=NameMapping([])).to_pylist() == [{"a": None, "b": None}]
    assert read(file, schema).to_pylist() == [{"a": 1, "b": "not this"}]


DEFAULTS: list[tuple[ice.IcebergType, Any, Any]] = [
    (ice.UUIDType(), uuid.UUID(int=5), uuid.UUID(int=5).bytes),
    (ice.TimestamptzType(), dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
]


@pytest.mark.parametrize(("kind", "default", "value"), DEFAULTS)
def test_later_columns_have_initial_default(kind: ice.IcebergType, default: Any, value: Any) -> None:
    """The default has the table's Arrow type, for any type, for a required column too, and if no other column is read."""
    schema = Schema(*OLD.fields, ice.NestedField(9, "later", kind, required=True, initial_default=default))
    found = read(parquet(ROWS, OLD), schema, "later")
    assert found["later"].to_pylist() == [value, value]
    assert found["later"].type == arrow_type(kind)


def test_unreadable_columns_are_refused() -> None:
    """A required column without a default, an unknown name, and a type that is not promoted are refused with both sides."""
    file = parquet(ROWS, OLD)
    with pytest.raises(NoSuchColumn, match=r"required column 'must' \(field id 9\)"):
        read(file, Schema(*OLD.fields, ice.NestedField(9, "must", ice.LongType(), required=True)))
    with pytest.raises(NoSuchColumn, match=r"columns \['a', 'b', 'c', 'd'\] .*found 'nothing'"):
        read(file, OLD, "nothing")
    for wrong in (
        optional(1, "a", ice.StringType()),
        optional(2, "b", ice.LongType()),
        optional(3, "c", ice.IntegerType()),
    ):
        with pytest.raises(UnsupportedColumn, match=f"'{wrong.name}' as {wrong.field_type} or .* found"):
            read(file, Schema(wrong))
    long = Schema(optional(1, "a", ice.LongType()))
    with pytest.raises(UnsupportedColumn, match="found int64"):
        read(parquet(pa.table({"a": [1]}), long), Schema(optional(1, "a", ice.IntegerType())))


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (pa.array(["x", None]).dictionary_encode(), ice.StringType()),
        (pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), ice.ListType(2, ice.LongType(), element_required=False)),
        (pa.array([[1], None], pa.large_list(pa.int64())), ice.ListType(2, ice.LongType(), element_required=True)),
        (pa.array([[["a"], None], None]), ice.ListType(2, ice.ListType(3, ice.StringType()), element_required=False)),
        (pa.array([Decimal("1.25"), None], pa.decimal128(5, 2)), ice.DecimalType(20, 2)),
        (pa.array([1_999, None], pa.timestamp("ns")), ice.TimestampType()),
        (pa.array([b"0123456789abcdef", None], pa.binary(16)), ice.UUIDType()),
        (
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef", None], pa.binary(16))),
            ice.UUIDType(),
        ),
    ],
)
def test_encodings_share_one_arrow_type(stored: Any, kind: ice.IcebergType) -> None:
    """Dictionaries, large or fixed lists and other units in the file are all read as the table's Arrow type."""
    found = read(parquet(pa.table({"v": stored})), Schema(optional(1, "v", kind)))["v"]
    assert found.type == arrow_type(kind)
    assert found.null_count == 1
    assert len(found) == 2


INNER_OLD = ice.StructType(optional(11, "x", ice.IntegerType()), optional(12, "gone", ice.StringType()))
INNER_NEW = ice.StructType(
    optional(13, "new", ice.StringType(), initial_default="d"), optional(11, "y", ice.LongType())
)
OLD_INNER = pa.struct({"x": pa.int32(), "gone": pa.string()})
STRUCTS = st.none() | st.fixed_dictionaries({"x": st.none() | st.integers(0, 9), "gone": st.none() | st.just("g")})


def fresh(field_id: int, inner: ice.StructType) -> ice.StructType:
    """Return the struct with new ids, as every struct of a schema has."""
    return ice.StructType(*(one.model_copy(update={"field_id": one.field_id + field_id}) for one in inner.fields))


PAIRS = st.dictionaries(st.text(max_size=2), st.none() | st.integers(0, 9), max_size=2)


@settings(max_examples=40)
@given(
    one=st.lists(STRUCTS, min_size=1, max_size=7),
    many=st.lists(st.none() | st.lists(STRUCTS, max_size=3), min_size=7, max_size=7),
    named=st.lists(st.none() | PAIRS, min_size=7, max_size=7),
)
def test_nested_fields_are_found_by_id(one: list[Any], many: list[Any], named: list[Any]) -> None:
    """Fields inside nested columns may be renamed, widened, dropped or added. Every null stays in its place."""
    old = Schema(
        optional(1, "one", fresh(100, INNER_OLD)),
        optional(2, "many", ice.ListType(20, fresh(200, INNER_OLD), element_required=False)),
        optional(3, "named", ice.MapType(30, ice.StringType(), 31, ice.IntegerType(), value_required=False)),
    )
    new = Schema(
        optional(3, "map", ice.MapType(30, ice.StringType(), 31, ice.LongType(), value_required=False)),
        optional(2, "list", ice.ListType(20, fresh(200, INNER_NEW), element_required=False)),
        optional(1, "struct", fresh(100, INNER_NEW)),
    )
    pairs = [n if n is None else list(n.items()) for n in named[: len(one)]]
    lists, maps = pa.array(many[: len(one)], pa.list_(OLD_INNER)), pa.array(pairs, pa.map_(pa.string(), pa.int32()))
    rows = pa.table({"one": pa.array(one, OLD_INNER), "many": lists, "named": maps})
    found = read(parquet(rows, old), new)
    assert found.schema.types == [arrow_type(field.field_type) for field in new.fields]
    assert found["struct"].to_pylist() == [projected(row) for row in one]
    assert found["list"].to_pylist() == [
        row if row is None else [projected(item) for item in row] for row in many[: len(one)]
    ]
    assert found["map"].to_pylist() == rows["named"].to_pylist()


def projected(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert an old struct to the new type."""
    return None if row is None else {"new": "d", "y": row["x"]}


def test_statistics_have_table_types() -> None:
    """Bounds of widened and renamed columns are values of the table's type. An absent or nested column has no bounds."""
    new = Schema(
        optional(1, "n", ice.LongType()),
        optional(2, "text", ice.StringType()),
        optional(3, "real", ice.DoubleType()),
        optional(5, "ns", ice.TimestampNanoType()),
        optional(6, "list", ice.ListType(7, ice.LongType())),
        optional(8, "absent", ice.LongType()),
    )
    old = Schema(
        *OLD.fields[:3],
        optional(5, "ns", ice.TimestampNanoType()),
        optional(6, "list", ice.ListType(7, ice.LongType())),
    )
    integers, reals = pa.array([3, None, 1], pa.int32()), pa.array([1, float("nan"), 2], pa.float32())
    moments = pa.array([1_000_000_007, 5, 5], pa.timestamp("ns"))
    rows = pa.table({"a": integers, "b": ["x", "b", "c"], "c": reals, "ns": moments, "list": [[1], [2], [3]]})
    file = parquet(rows, old)
    columns = FileColumns.of(file.schema_arrow, new, ["n", "text", "real", "ns", "list", "absent"])
    found = columns.bounds(ParquetFooter(file), 0)
    assert {name: one.nulls for name, one in found.items()} == {"n": 1, "text": 0, "real": 0, "ns": 0}
    assert (found["n"].lower, found["n"].upper) == (pa.scalar(1, pa.int64()), pa.scalar(3, pa.int64()))
    assert (found["text"].lower.as_py(), found["text"].upper.as_py()) == ("b", "x")
    assert (found["real"].lower, found["real"].upper) == (pa.scalar(1.0), pa.scalar(2.0))
    assert found["ns"].upper.value == 1_000_000_007


def test_values_beyond_32_bit_offsets() -> None:
    """Values that do not fit one array with 32-bit offsets get 64-bit offsets, or several arrays."""
    lists = pa.ListArray.from_arrays([0, 2**30], pa.nulls(2**30))  # nulls take no memory
    joined = concat_chunks([lists] * 3, lists.type)
    assert (pa.types.is_large_list(joined.type), len(joined), len(joined.values)) == (True, 3, 3 * 2**30)
    ends = np.array([0, 2**30, 2**31 - 2**20, 2**31 + 5])
    texts = pa.LargeStringArray.from_buffers(3, pa.py_buffer(ends), pa.py_buffer(np.zeros(2**31 + 5, np.uint8)))
    schema = Schema(optional(1, "s", ice.StringType()))
    columns = FileColumns.of(pa.schema({"s": pa.large_string()}), schema, ["s"])
    found = columns.align(pa.table({"s": texts}), 3)["s"]
    assert (found.type, [len(chunk) for chunk in found.chunks]) == (pa.string(), [2, 1])
    assert [int(pc.binary_length(chunk)[0].as_py()) for chunk in found.chunks] == [2**30, 2**20 + 5]
    one = texts.slice(0, 1)
    longest = pa.LargeStringArray.from_buffers(1, pa.py_buffer(np.array([0, 2**31 + 5])), texts.buffers()[2])
    assert columns.align(pa.table({"s": one}), 1)["s"].num_chunks == 1
    with pytest.raises(UnsupportedColumn, match="column 's' as string, found large_string"):
        columns.align(pa.table({"s": longest}), 1)
