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
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import NameMapping
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzType,
    UUIDType,
)

from dlac_pipeline.lakehouse.errors import NoSuchColumn, UnsupportedColumn
from dlac_pipeline.lakehouse.files.parquet import ParquetFooter
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, arrow_type, concat_chunks


def optional(field_id: int, name: str, kind: IcebergType, **more: Any) -> NestedField:
    """Return an optional field."""
    return NestedField(field_id, name, kind, required=False, **more)


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
    optional(1, "a", IntegerType()),
    optional(2, "b", StringType()),
    optional(3, "c", FloatType()),
    optional(4, "d", BinaryType()),
)
ROWS = pa.table(
    {
        "a": pa.array([1, None], pa.int32()),
        "b": ["x", None],
        "c": pa.array([0.5, None], pa.float32()),
        "d": [b"\0", None],
    }
)


def test_file_without_ids_uses_name_mapping() -> None:
    """A name mapping decides, even an empty one. Without a mapping the schema's names decide."""
    schema = Schema(optional(1, "a", LongType()), optional(2, "b", StringType()))
    file = parquet(pa.table({"a": [1], "old_b": ["x"], "b": ["not this"]}))
    mapping = NameMapping.model_validate(
        [{"field-id": 1, "names": ["a"]}, {"field-id": 2, "names": ["older_b", "old_b"]}]
    )
    assert read(file, schema, name_mapping=mapping).to_pylist() == [{"a": 1, "b": "x"}]
    assert read(file, schema, name_mapping=NameMapping([])).to_pylist() == [{"a": None, "b": None}]
    assert read(file, schema).to_pylist() == [{"a": 1, "b": "not this"}]


DEFAULTS: list[tuple[IcebergType, Any, Any]] = [
    (UUIDType(), uuid.UUID(int=5), uuid.UUID(int=5).bytes),
    (TimestamptzType(), dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
]


@pytest.mark.parametrize(("kind", "default", "value"), DEFAULTS)
def test_later_columns_have_initial_default(kind: IcebergType, default: Any, value: Any) -> None:
    """The default has the table's Arrow type, for any type, for a required column too, and if no other column is read."""
    schema = Schema(*OLD.fields, NestedField(9, "later", kind, required=True, initial_default=default))
    found = read(parquet(ROWS, OLD), schema, "later")
    assert found["later"].to_pylist() == [value, value]
    assert found["later"].type == arrow_type(kind)


def test_unreadable_columns_are_refused() -> None:
    """A required column without a default, an unknown name, and a type that is not promoted are refused with both sides."""
    file = parquet(ROWS, OLD)
    with pytest.raises(NoSuchColumn, match=r"required column 'must' \(field id 9\)"):
        read(file, Schema(*OLD.fields, NestedField(9, "must", LongType(), required=True)))
    with pytest.raises(NoSuchColumn, match=r"columns \['a', 'b', 'c', 'd'\] .*found 'nothing'"):
        read(file, OLD, "nothing")
    for wrong in (optional(1, "a", StringType()), optional(2, "b", LongType()), optional(3, "c", IntegerType())):
        with pytest.raises(UnsupportedColumn, match=f"'{wrong.name}' as {wrong.field_type} or .* found"):
            read(file, Schema(wrong))
    long = Schema(optional(1, "a", LongType()))
    with pytest.raises(UnsupportedColumn, match="found int64"):
        read(parquet(pa.table({"a": [1]}), long), Schema(optional(1, "a", IntegerType())))


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (pa.array(["x", None]).dictionary_encode(), StringType()),
        (pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), ListType(2, LongType(), element_required=False)),
        (pa.array([[1], None], pa.large_list(pa.int64())), ListType(2, LongType(), element_required=True)),
        (pa.array([[["a"], None], None]), ListType(2, ListType(3, StringType()), element_required=False)),
        (pa.array([Decimal("1.25"), None], pa.decimal128(5, 2)), DecimalType(20, 2)),
        (pa.array([1_999, None], pa.timestamp("ns")), TimestampType()),
        (pa.array([b"0123456789abcdef", None], pa.binary(16)), UUIDType()),
        (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef", None], pa.binary(16))), UUIDType()),
    ],
)
def test_encodings_share_one_arrow_type(stored: Any, kind: IcebergType) -> None:
    """Dictionaries, large or fixed lists and other units in the file are all read as the table's Arrow type."""
    found = read(parquet(pa.table({"v": stored})), Schema(optional(1, "v", kind)))["v"]
    assert found.type == arrow_type(kind)
    assert found.null_count == 1
    assert len(found) == 2


INNER_OLD = StructType(optional(11, "x", IntegerType()), optional(12, "gone", StringType()))
INNER_NEW = StructType(optional(13, "new", StringType(), initial_default="d"), optional(11, "y", LongType()))
OLD_INNER = pa.struct({"x": pa.int32(), "gone": pa.string()})
STRUCTS = st.none() | st.fixed_dictionaries({"x": st.none() | st.integers(0, 9), "gone": st.none() | st.just("g")})


def fresh(field_id: int, inner: StructType) -> StructType:
    """Return the struct with new ids, as every struct of a schema has."""
    return StructType(*(one.model_copy(update={"field_id": one.field_id + field_id}) for one in inner.fields))


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
        optional(2, "many", ListType(20, fresh(200, INNER_OLD), element_required=False)),
        optional(3, "named", MapType(30, StringType(), 31, IntegerType(), value_required=False)),
    )
    new = Schema(
        optional(3, "map", MapType(30, StringType(), 31, LongType(), value_required=False)),
        optional(2, "list", ListType(20, fresh(200, INNER_NEW), element_required=False)),
        optional(1, "struct", fresh(100, INNER_NEW)),
    )
    rows = pa.table(
        {
            "one": pa.array(one, OLD_INNER),
            "many": pa.array(many[: len(one)], pa.list_(OLD_INNER)),
            "named": pa.array(
                [n if n is None else list(n.items()) for n in named[: len(one)]], pa.map_(pa.string(), pa.int32())
            ),
        }
    )
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
        optional(1, "n", LongType()),
        optional(2, "text", StringType()),
        optional(3, "real", DoubleType()),
        optional(5, "ns", TimestampNanoType()),
        optional(6, "list", ListType(7, LongType())),
        optional(8, "absent", LongType()),
    )
    old = Schema(*OLD.fields[:3], optional(5, "ns", TimestampNanoType()), optional(6, "list", ListType(7, LongType())))
    rows = pa.table(
        {
            "a": pa.array([3, None, 1], pa.int32()),
            "b": ["x", "b", "c"],
            "c": pa.array([1, float("nan"), 2], pa.float32()),
            "ns": pa.array([1_000_000_007, 5, 5], pa.timestamp("ns")),
            "list": [[1], [2], [3]],
        }
    )
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
    schema = Schema(optional(1, "s", StringType()))
    columns = FileColumns.of(pa.schema({"s": pa.large_string()}), schema, ["s"])
    found = columns.align(pa.table({"s": texts}), 3)["s"]
    assert (found.type, [len(chunk) for chunk in found.chunks]) == (pa.string(), [2, 1])
    assert [int(pc.binary_length(chunk)[0].as_py()) for chunk in found.chunks] == [2**30, 2**20 + 5]
    one = texts.slice(0, 1)
    longest = pa.LargeStringArray.from_buffers(1, pa.py_buffer(np.array([0, 2**31 + 5])), texts.buffers()[2])
    assert columns.align(pa.table({"s": one}), 1)["s"].num_chunks == 1
    with pytest.raises(UnsupportedColumn, match="column 's' as string, found large_string"):
        columns.align(pa.table({"s": longest}), 1)
