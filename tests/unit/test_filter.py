"""The text of filters, their literals, and their three-valued logic."""

import datetime as dt
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg import types as ice
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, MonthTransform, TruncateTransform

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid
from dlac_pipeline.lakehouse.filters.conditions import Combination, IsAmong
from dlac_pipeline.lakehouse.filters.facts import of_partition
from dlac_pipeline.lakehouse.filters.grammar import parse_filter
from dlac_pipeline.lakehouse.iceberg.columns import arrow_type
from tests.iceberg_schemas import optional_fields

NAN = float("nan")
DAYS = [dt.date(1969, 12, 31), dt.date(2024, 1, 31), dt.date(2024, 2, 1), dt.date(1, 1, 1)]
TIMES = [dt.datetime(*at) for at in ((2024, 1, 31), (2024, 1, 31, 12), (1969, 12, 31, 23), (9999, 12, 31))]
PRICES = [Decimal("0.10"), Decimal("1.50"), Decimal("-1.50"), Decimal("9999999.99")]
COLUMNS: dict[str, tuple[ice.IcebergType, list[Any]]] = {
    "n": (ice.LongType(), [1, 2, 2**63 - 1, -(2**63), None]),
    "x": (ice.DoubleType(), [0.0, -0.0, NAN, 0.1, None]),
    "f": (ice.FloatType(), [0.1, NAN, 3.4028234663852886e38, float("inf"), None]),
    "ok": (ice.BooleanType(), [True, False, True, False, None]),
    "s": (ice.StringType(), ["a", "a_b", "axb", "a%", None]),
    "raw": (ice.BinaryType(), [b"a", b"\xff", b"", b"ab", None]),
    "key": (ice.UUIDType(), [uuid.UUID(int=n).bytes for n in range(4)] + [None]),
    "day": (ice.DateType(), [*DAYS, None]),
    "ts": (ice.TimestampType(), [*TIMES, None]),
    "tz": (ice.TimestamptzType(), [*(time.replace(tzinfo=dt.UTC) for time in TIMES), None]),
    "price": (ice.DecimalType(9, 2), [*PRICES, None]),
    "a.b": (ice.LongType(), [1, 2, 3, 4, None]),
}  # fmt: skip
STRUCT = ice.StructType(*optional_fields({"b": ice.LongType(), "c.d": ice.LongType()}, first_id=101))
SCHEMA = Schema(
    *optional_fields({name: kind for name, (kind, _) in COLUMNS.items()}),
    *optional_fields({"st": STRUCT}, first_id=100),
    *optional_fields({"list": ice.ListType(104, ice.LongType(), element_required=False)}, first_id=103),
)
TABLE = pa.table(
    {
        **{name: pa.array(values, arrow_type(kind)) for name, (kind, values) in COLUMNS.items()},
        "st": [{"b": 1, "c.d": 10}, {"b": 2, "c.d": None}, None, {"b": None, "c.d": 10}, {"b": 1, "c.d": 20}],
        "list": [[1], [], None, [None], None],
    }
)


def rows_of(text: str) -> list[int]:
    """Return the places of the rows for which a filter is true."""
    condition = parse_filter(text, SCHEMA)
    assert condition.columns == [] or set(condition.columns) <= set(TABLE.column_names)
    found: list[int] = condition.true_rows(TABLE).nonzero()[0].tolist()
    return found


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("n = 1.5", []),
        ("n not in (1.5, 1)", [1, 2, 3]),
        ("n = '1'", [0]),
        ("n >= 9223372036854775808", []),
        ("n between 0.5 and 2.5", [0, 1]),
        ("price = 0.105", []),
        ("price in (1.5, -1.5, 0.001)", [1, 2]),
        ("day = '2024-01-31T12:00:00'", []),
        ("ts > '2024-01-31 11:59:59.9999999'", [1, 3]),
        ("ts between DATE '2024-01-31' and TIMESTAMP '2024-01-31 12:00:00'", [0, 1]),
        ("tz = '2024-01-31T00:00:00'", [0]),
        ("raw = X'ff'", [1]),
        (f"key >= '{uuid.UUID(int=2)}'", [2, 3]),
        (r"s like 'a\_b'", [1]),
        (r"s like 'a\%'", [3]),
        *(("x = 0", [0, 1]), ("n is nan", []), ("f = 0.1", [0]), ("f = 'inf'", [3])),
        *(("a.b = 1", [0]), ("st.b = 1", [0, 4]), ("st.c.d = 10", [0, 3]), ('st."c.d" in (20)', [4])),
        *(("list is null", [2, 4]), ("n = 1 or n = 2 and x = 5", [0]), ("not n = 1 and n < 5", [1, 3])),
    ],
)  # fmt: skip
def test_filter_selects_rows(text: str, rows: list[int]) -> None:
    """A literal is compared as in SQL, null is never selected, and NOT binds closer than AND, and AND closer than OR."""
    assert rows_of(text) == rows


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("n = true", "'n' of type long.*true"),
        ("n in (1, 'abc')", "'n' of type long.*'abc'"),
        ("day > '2024-02-30'", "'day' of type date.*'2024-02-30'"),
        ("ts = '2024-01-31T00:00:00Z'", "'ts' of type timestamp.*'2024-01-31T00:00:00Z'"),
        ("key = 'abc'", "'key' of type uuid.*'abc'"),
        ("n like 'a%'", "'n' of type long.*'a%'"),
        ("n = 1 -- and ok", "makes no sense at '-- and ok': "),
        ("abs(n) = 1", r"makes no sense at 'ABS\(n\)': "),
        ("n = cast('1' as decimal)", r"makes no sense at 'as decimal\)': "),
        ("case when ok then n end = 1", "makes no sense at 'when ok then n end = 1': "),
        ("(n > 1", "at '1':"),
        ("n > NULL", "at 'NULL': .* with NULL by IS NULL"),
        ("n > x", "at 'x': compare with literals"),
        ('s = "a"', "single quotes"),
        ("n = 1; drop", "at '; drop'"),
        ("n in ()", r"write IN \(1, 2\)"),
        ("n between 1 2", "BETWEEN 1 AND 2"),
        ("s = 'open", "close each quote"),
        ("\t\n", "found the blank"),
        ("n = 1e99999999999999999999", "out of range"),
        ("(" * 9999, "nest at most 25 deep"),
        ("not " * 9999 + "n = 1", "write NOT once"),
    ],
)
def test_refused_filters_are_located(text: str, where: str) -> None:
    """The error names column, type and literal, or the part without a meaning, and what to write, and lists no grammar."""
    with pytest.raises(SpecInvalid, match=where) as caught:
        parse_filter(text, SCHEMA)
    assert len(str(caught.value)) < 250 + 2 * len(text)


def test_long_filters_bind() -> None:
    """Lists and chains of thousands of parts are read, and stay flat."""
    listed = parse_filter(f"n in ({', '.join(map(str, range(3_000)))})", SCHEMA)
    assert isinstance(listed, IsAmong)
    assert listed.members == frozenset(range(3_000))
    chained = parse_filter(" or ".join(f"(n > {place} or x is null)" for place in range(1_000)), SCHEMA)
    assert isinstance(chained, Combination)
    assert len(chained.parts) == 1_000


@pytest.mark.parametrize(
    ("text", "advice"),
    [("colour = 'red'", "name one of these"), ("st.z = 1", "did you mean 'st.b'?"), ("N = 1", "did you mean 'n'?")],
)
def test_unknown_columns_are_named(text: str, advice: str) -> None:
    """A name must be a column's or a struct field's. The closest one is named, whatever the case of its letters."""
    with pytest.raises(NoSuchColumn, match=r"expected one of the columns .* 'st', 'st.b', 'st.c.d', 'list'") as caught:
        parse_filter(text, SCHEMA)
    assert str(caught.value).endswith(f": {advice}")


def test_truncated_extremes_are_kept() -> None:
    """Engines that overflow put the smallest longs among the largest, so such a partition proves nothing."""
    condition = parse_filter("n < 0", SCHEMA)
    least = -(2**63)
    for stored in (least - least % 10, least - least % 10 + 2**64):
        assert condition.may_be_true({1: of_partition(TruncateTransform(10), ice.LongType(), stored)})
    assert not condition.may_be_true({1: of_partition(TruncateTransform(10), ice.LongType(), 10)})
    assert condition.must_be_true({1: of_partition(TruncateTransform(10), ice.LongType(), -20)})


def test_partitions_prove_times() -> None:
    """Before 1970 a partition may hold rows of the earlier unit, as some engines round. After 1970 it may not."""
    condition = parse_filter("ts < '1970-01-01'", SCHEMA)
    for transform in (DayTransform[Any](), MonthTransform[Any]()):
        known = {value: {9: of_partition(transform, ice.TimestampType(), value)} for value in (-2, 0, 1)}
        assert [condition.may_be_true(known[value]) for value in (-2, 0, 1)] == [True, True, False]
        assert [condition.must_be_true(known[value]) for value in (-2, 0, 1)] == [True, False, False]
