"""Filters that name rows by values: each is read back as the rows that it was made of."""

import string
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg import types as ice
from pyiceberg.schema import Schema

from dlac_pipeline.extensions.replay.named_rows import filter_of_rows
from dlac_pipeline.lakehouse.filters.conditions import IsAmong
from dlac_pipeline.lakehouse.filters.grammar import parse_filter

KEY = UUID("12345678-1234-5678-1234-567812345678")
EACH: list[tuple[ice.IcebergType, Any, str]] = [
    (ice.LongType(), -7, "c = -7"),
    (ice.DoubleType(), 1e-07, "c = 1e-07"),
    (ice.DoubleType(), float("nan"), "c IS NAN"),
    (ice.StringType(), None, "c IS NULL"),
    (ice.StringType(), 'it\'s \\ "x"', "c = 'it''s \\ \"x\"'"),
    (ice.DecimalType(20, 4), Decimal("-12.3400"), "c = -12.3400"),
    (ice.DateType(), date(2024, 1, 31), "c = '2024-01-31'"),
    (ice.TimeType(), time(12, 30, 0, 5), "c = '12:30:00.000005'"),
    (ice.TimestamptzType(), datetime(2024, 1, 31, 12, tzinfo=UTC), "c = '2024-01-31T12:00:00+00:00'"),
    (ice.BinaryType(), b"\x00'", "c = X'0027'"),
    (ice.UUIDType(), KEY.bytes, f"c = '{KEY}'"),
    (ice.UUIDType(), KEY, f"c = '{KEY}'"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), EACH)
def test_each_type_is_written(kind: ice.IcebergType, value: Any, expected: str) -> None:
    """A value of each type is written as the grammar reads it."""
    field = ice.NestedField(1, "c", kind, required=False)
    assert filter_of_rows([field], [(value,)]) == expected
    parse_filter(expected, Schema(field))


def test_several_rows_and_columns() -> None:
    """One column is a list without repeats, several columns are a condition for each row."""
    one, two = (ice.NestedField(n, name, ice.LongType(), required=False) for n, name in ((1, "in"), (2, "b")))
    assert filter_of_rows([one], [(1,), (2,), (None,), (1,)]) == '"in" IN (1, 2) OR "in" IS NULL'
    assert filter_of_rows([one, two], [(1, 2), (3, None)]) == '("in" = 1 AND b = 2) OR ("in" = 3 AND b IS NULL)'
    parse_filter(filter_of_rows([one, two], [(row, row) for row in range(2_000)]), Schema(one, two))


@given(
    st.lists(st.text(), min_size=1, max_size=5),
    st.text(string.printable, min_size=1) | st.sampled_from(["in", "date", "a.b", 'x"']),
)
def test_any_text_is_read_back(values: list[str], name: str) -> None:
    """No text ends its quotes, and no name of a column is taken for a word of the grammar."""
    field = ice.NestedField(1, name, ice.StringType(), required=False)
    found = parse_filter(filter_of_rows([field], [(each,) for each in values]), Schema(field))
    assert isinstance(found, IsAmong)
    assert (found.path.name, found.members) == (name, frozenset(values))
