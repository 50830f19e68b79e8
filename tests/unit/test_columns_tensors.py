import datetime as dt
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg import types as ice
from pyiceberg.schema import Schema

from dlac_pipeline.lakehouse.errors import NoSuchColumn, UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.columns import arrow_type
from dlac_pipeline.read.assemble import assemble
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.rows.columns import ColumnKind, check_names, kinds_of, to_column

LONGS = ice.ListType(100, ice.LongType(), element_required=False)
TYPES: dict[str, ice.IcebergType] = {
    **{"flag": ice.BooleanType(), "small": ice.IntegerType(), "big": ice.LongType(), "real": ice.DoubleType()},
    **{"day": ice.DateType(), "clock": ice.TimeType(), "instant": ice.TimestamptzType(), "four": ice.FixedType(4)},
    **{"key": ice.UUIDType(), "text": ice.StringType(), "blob": ice.BinaryType(), "tokens": LONGS},
    **{"price": ice.DecimalType(9, 2), "pair": ice.StructType(ice.NestedField(200, "a", ice.LongType()))},
    "words": ice.ListType(101, ice.StringType(), element_required=False),
}
SCHEMA = Schema(
    *(ice.NestedField(place, name, kind, required=False) for place, (name, kind) in enumerate(TYPES.items(), 1))
)


def kind(name: str, *, ragged: bool = False, nullable: bool = False) -> ColumnKind:
    """The kind of a column of SCHEMA as declared."""
    return kinds_of(SCHEMA, [name], [name] if ragged else [], [name] if nullable else [])[name]


def chunked(name: str, *chunks: list[Any]) -> pa.ChunkedArray:
    """Return a column of SCHEMA in its Arrow type."""
    column_type = arrow_type(TYPES[name])
    return pa.chunked_array([pa.array(chunk, type=column_type) for chunk in chunks], type=column_type)


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("flag", [True, False], np.array([True, False])),
        ("real", [1.5, float("inf")], np.array([1.5, np.inf])),
        ("day", [dt.date(1970, 1, 2), dt.date(1969, 12, 31)], np.array([1, -1], dtype=np.int64)),
        ("four", [b"abcd", b"efgh"], np.frombuffer(b"abcdefgh", dtype=np.uint8).reshape(2, 4)),
        ("key", [uuid.UUID(int=7).bytes], np.array([[0] * 15 + [7]], dtype=np.uint8)),
        ("tokens", [[1, 2], [3, 4]], np.array([[1, 2], [3, 4]], dtype=np.int64)),
    ],
)
def test_dense_columns_become_typed_arrays(name: str, rows: list[Any], expected: np.ndarray[Any, Any]) -> None:
    """Numbers, booleans, times, fixed bytes and lists of one length are arrays [rows] or [rows, length]."""
    column = to_column(chunked(name, rows), kind(name), origin="here")
    assert column.values.dtype == expected.dtype == np.dtype(kind(name).items)
    assert np.array_equal(column.values, expected)
    assert column.offsets is None
    assert column.valid is None
    assert column.rows == len(rows)
    split = to_column(chunked(name, rows[:1], [], rows[1:]), kind(name), origin="here")
    assert np.array_equal(split.values, expected)


@pytest.mark.parametrize(
    ("name", "rows", "zero"),
    [
        ("flag", [True, None], False),
        ("big", [1, None], 0),
        ("four", [b"abcd", None], [0, 0, 0, 0]),
        ("tokens", [[1, 2], None], [0, 0]),
    ],
)
def test_nulls_need_declaration(name: str, rows: list[Any], zero: Any) -> None:
    """Undeclared nulls are refused with the setting that allows them. Declared nulls are zeros, with a mask in `valid`."""
    with pytest.raises(
        UnsupportedColumn, match=rf"no nulls in column '{name}', found 1 in here.*nullable = \[\"{name}\"\]"
    ):
        to_column(chunked(name, rows), kind(name), origin="here")
    column = to_column(chunked(name, rows), kind(name, nullable=True), origin="here")
    assert column.valid is not None
    assert column.valid.tolist() == [True, False]
    assert column.values[1].tolist() == zero
    assert kind(name, nullable=True).tensors == (name, f"{name}.valid")


def test_ragged_lists_need_declaration() -> None:
    """The error names packing and the declaration. Two batches with lists of different lengths are refused too."""
    with pytest.raises(UnsupportedColumn, match=r"found 1 to 2 in here: pack them with \[sequences\], or declare"):
        to_column(chunked("tokens", [[1], [1, 2]]), kind("tokens"), origin="here")
    one, two = (to_column(chunked("tokens", rows), kind("tokens"), origin="here") for rows in ([[1]], [[1, 2]]))
    at = np.arange(1)
    with pytest.raises(UnsupportedColumn, match=r"lengths \[1, 2\] in one batch"):
        assemble(kind("tokens"), [(one, at, at), (two, at, at + 1)], 2, Buffers())


def test_declarations_are_checked() -> None:
    """A declared column must exist and can become a tensor. Only lists are declared ragged. Strings are ragged anyway."""
    kinds_of(SCHEMA, ["text", "tokens"], ragged=["tokens"], nullable=["text"])
    with pytest.raises(NoSuchColumn, match=r"in nullable of source 's', found 'txet': did you mean 'text'\?$"):
        check_names(SCHEMA, ["text", "txet"], setting="nullable of source 's'")
    for name in ("price", "pair", "words"):
        with pytest.raises(UnsupportedColumn, match=name):
            kinds_of(SCHEMA, [name])
    with pytest.raises(UnsupportedColumn, match="a list column among the ragged ones, found 'big'"):
        kinds_of(SCHEMA, ["big"], ragged=["big"])
    assert kind("text").tensors == ("text", "text.offsets")
