from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, TruncateTransform
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
)

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid
from dlac_pipeline.lakehouse.filters.grammar import parse_filter
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns
from dlac_pipeline.lakehouse.iceberg.data_files import live_files
from dlac_pipeline.lakehouse.iceberg.row_groups import FilesToRead, row_groups_of
from tests.iceberg_schemas import arrow_fields, optional_fields
from tests.integration.iceberg_oracle import live_positions
from tests.integration.iceberg_writer import HandTable

SCHEMA = Schema(
    *optional_fields(
        {
            "n": LongType(),
            "s": StringType(),
            "x": DoubleType(),
            "day": DateType(),
            "ts": TimestampType(),
            "ok": BooleanType(),
            "price": DecimalType(9, 2),
        }
    )
)
TYPES = {each.name: each.type for each in arrow_fields(SCHEMA) if each.name != "price"}
START = dt.datetime(2024, 1, 1)


def row(n: int | None) -> dict[str, Any]:
    """A row that follows from one number, with nulls here and there."""
    if n is None:
        return dict.fromkeys(TYPES)
    at = START + dt.timedelta(hours=7 * n)
    return {"n": n, "s": f"s{n % 4}" if n % 7 else None, "x": n / 2, "day": at.date(), "ts": at, "ok": n % 3 == 0}


def rows(numbers: list[int | None]) -> pa.Table:
    """Rows of these numbers."""
    found = pa.table({name: pa.array([row(n)[name] for n in numbers], kind) for name, kind in TYPES.items()})
    prices = found["n"].cast(pa.decimal128(19, 0)).cast(pa.decimal128(21, 2)).cast(pa.decimal128(9, 2))
    return found.append_column("price", prices)


def kept(hand: HandTable, row_filter: str, **options: Any) -> list[tuple[str, int]]:
    """(file, position) of the live rows under a filter."""
    groups = row_groups_of(hand.table, hand.snapshot_id, row_filter, **options)
    return [(path, row) for path, live in sorted(live_positions(groups).items()) for row in live]


def duckdb_keeps(hand: HandTable, where: str) -> list[tuple[str, int]]:
    """The same by DuckDB."""
    with duckdb.connect() as connection:
        return connection.execute(
            "SELECT filename, file_row_number FROM read_parquet(?, file_row_number = true, filename = true) "
            f"WHERE {where} ORDER BY ALL",
            [[one.path for one in hand.files]],
        ).fetchall()


def read_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every row group whose filter columns are read from now on."""
    aligned: list[int] = []
    real = FileColumns.align

    def counted(columns: FileColumns, read: pa.Table, count: int) -> pa.Table:
        aligned.append(count)
        return real(columns, read, count)

    monkeypatch.setattr(FileColumns, "align", counted)
    return aligned


PREDICATES = [
    "n < {}", "n >= {}", "n = {}", "n != {}", "n IN ({}, 3)", "n NOT IN ({}, 3)", "n IS NULL", "n IS NOT NULL",
    "s = 's1'", "s != 's1'", "s IN ('s1', 's2')", "s NOT IN ('s1')", "s IS NULL", "s LIKE 's1%'", "s NOT LIKE 's1%'",
    "x < {}.5", "x >= {}", "x != {}", "day = '2024-01-03'", "day < '2024-01-05'", "ts >= '2024-01-04T07:00:00'",
    "ok = true", "ok != false", "ok IS NULL", "price > {}", "price != {}",
]  # fmt: skip
SQL = st.recursive(
    st.builds(str.format, st.sampled_from(PREDICATES), st.integers(-1, 30)),
    lambda inner: (
        st.builds("({} AND {})".format, inner, inner)
        | st.builds("({} OR {})".format, inner, inner)
        | st.builds("NOT ({})".format, inner)
    ),
    max_leaves=4,
)
NUMBERS = st.lists(st.none() | st.integers(0, 30), min_size=1, max_size=14).map(
    lambda found: sorted(found, key=lambda n: (n is None, n))
)
SPECS = [
    PartitionSpec(spec_id=0),
    PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "s"), spec_id=1),
    PartitionSpec(
        PartitionField(4, 1001, IdentityTransform(), "day"),
        PartitionField(2, 1000, IdentityTransform(), "s"),
        spec_id=2,
    ),
    PartitionSpec(PartitionField(5, 1002, DayTransform(), "ts_day"), spec_id=3),
    PartitionSpec(
        PartitionField(1, 1003, TruncateTransform(10), "n_trunc"),
        PartitionField(2, 1004, BucketTransform(4), "s_bucket"),
        spec_id=4,
    ),
]


def append(hand: HandTable, numbers: list[int | None], spec: int, *, statistics: bool) -> None:
    """Append one data file per partition of the rows."""
    parts: dict[tuple[Any, ...], list[int | None]] = {}
    for number in numbers:
        values = {SCHEMA.find_field(name).field_id: value for name, value in row(number).items()}
        key = tuple(
            part.transform.transform(SCHEMA.find_type(part.source_id))(internal(values[part.source_id]))
            for part in SPECS[spec].fields
        )
        parts.setdefault(key, []).append(number)
    for key, part in parts.items():
        hand.append(rows(part), spec=spec, partition=key, row_group_rows=3, statistics=statistics)


def internal(value: Any) -> Any:
    """A value as Iceberg keeps it."""
    if isinstance(value, dt.datetime):
        return int((value - dt.datetime(1970, 1, 1)) / dt.timedelta(microseconds=1))
    return (value - dt.date(1970, 1, 1)).days if isinstance(value, dt.date) else value


@settings(max_examples=25, deadline=None)
@given(sql=SQL, appended=st.lists(st.tuples(NUMBERS, st.integers(0, 4), st.booleans()), min_size=1, max_size=3))
def test_any_filter_keeps_the_rows_that_duckdb_keeps(
    tmp_path_factory: pytest.TempPathFactory, sql: str, appended: list[tuple[list[int | None], int, bool]]
) -> None:
    """Through partitions of every kind, evolved specs, metrics, statistics and rows, a filter means what SQL means.

    As an exclusion it takes just those rows and leaves the list of row groups as it is.
    """
    hand = HandTable(tmp_path_factory.mktemp("t"), [SCHEMA], specs=SPECS)
    for numbers, spec, statistics in appended:
        append(hand, numbers, spec, statistics=statistics)
    wanted = duckdb_keeps(hand, sql)
    assert kept(hand, sql) == wanted
    everything = duckdb_keeps(hand, "true")
    assert kept(hand, "", exclude=[sql]) == [one for one in everything if one not in set(wanted)]
    assert len(row_groups_of(hand.table, hand.snapshot_id, "", exclude=[sql])) == len(
        row_groups_of(hand.table, hand.snapshot_id, "")
    )


@pytest.mark.parametrize(
    "row_filter", ["x > 1", "x <= 1", "NOT x > 1", "x != 1", "x IN (1, 2)", "x IS NAN", "x IS NOT NULL"]
)
def test_not_a_number_is_never_lost_in_statistics(tmp_path: Path, row_filter: str) -> None:
    """Parquet's statistics leave NaN aside: they decide nothing that the rows themselves would decide otherwise."""
    nan = float("nan")
    alone, among = HandTable(tmp_path / "a", [SCHEMA]), HandTable(tmp_path / "b", [SCHEMA])
    values = [1.0, 1.0, nan, 2.0, 0.5, None]
    table = rows(list(range(6))).set_column(2, "x", pa.array(values))
    path = among.append(table, row_group_rows=6)
    found = {position for _, position in kept(among, row_filter)}
    for position in range(6):
        alone.append(table.slice(position, 1), row_group_rows=1, statistics=False)
    assert {int(Path(name).name[:3]) for name, _ in kept(alone, row_filter)} == found
    assert live_files(among.table, among.snapshot_id)[0].path == path


def test_statistics_spare_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group that statistics exclude or prove wholly true is not read; what they leave open is, once."""
    hand = HandTable(tmp_path / "t", [SCHEMA])
    hand.append(rows(list(range(1, 31))), row_group_rows=3, statistics=False)
    read = read_rows(monkeypatch)
    groups = row_groups_of(hand.table, hand.snapshot_id, "n >= 8 AND n < 22", exclude=["n = 12"])
    assert sum(one.rows - len(one.dead) for one in groups) == 13
    assert len(groups) == 10
    assert read == [3, 3]  # rows 7-9 hold an end of the range, rows 10-12 an excluded row
    assert [len(one.dead) for one in groups] == [3, 3, 1, 1, 0, 0, 0, 3, 3, 3]


def test_files_that_metrics_exclude_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions and column metrics spare whole files, which are then not listed."""
    hand = HandTable(tmp_path / "t", [SCHEMA], specs=SPECS)
    hand.append(rows([1, 2]))
    hand.append(rows([5, 6]))
    hand.append(rows([9]), spec=1, partition=("s1",))
    assert [one[0][-16:-13] for one in kept(hand, "n > 4 AND s != 's1'")] == ["001"]
    table = hand.table
    monkeypatch.setattr(
        "dlac_pipeline.lakehouse.files.parquet.pq.ParquetFile", lambda _: pytest.fail("a footer was read")
    )
    assert row_groups_of(table, hand.snapshot_id, "n > 10 OR s = 'zzz'") == []


def test_partitions_decide_what_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an identity partition the filter on its column needs no reading; other columns remain as the residual."""
    hand = HandTable(tmp_path / "t", [SCHEMA], specs=SPECS)
    hand.append(rows([1, 9]), spec=1, partition=("s1",))
    read = read_rows(monkeypatch)
    assert len(kept(hand, "s = 's1'")) == 2
    assert read == []
    (file,) = live_files(hand.table, hand.snapshot_id, parse_filter("s = 's1' AND ok = true", SCHEMA))
    assert file.residual.columns == ["ok"]


def test_only_the_chosen_files_are_planned(tmp_path: Path) -> None:
    """Only the live files in `only` are read, and progress counts them."""
    hand = HandTable(tmp_path / "t", [SCHEMA])
    for start in (0, 10, 20):
        hand.append(rows([start, start + 1]))
    seen: list[tuple[int, int]] = []
    later = {file.path for file in live_files(hand.table, hand.snapshot_id) if file.snapshot_id != 1001}
    groups = row_groups_of(
        hand.table,
        hand.snapshot_id,
        "",
        reads=FilesToRead(only=later, progress=lambda done, total: seen.append((done, total))),
    )
    assert [Path(one.file_path).name[:3] for one in groups] == ["001", "002"]
    assert seen == [(1, 2), (2, 2)]


def test_filters_know_renamed_widened_and_later_columns(tmp_path: Path) -> None:
    """A filter speaks of the schema's columns; old files answer by field id, widened, or with the column's default."""
    old = Schema(NestedField(1, "a", IntegerType(), required=False), NestedField(2, "b", StringType()), schema_id=0)
    new = Schema(
        NestedField(2, "text", StringType(), required=False),
        NestedField(1, "number", LongType(), required=False),
        NestedField(3, "a", LongType(), required=False),
        NestedField(4, "later", LongType(), required=True, initial_default=7),
        schema_id=1,
    )
    hand = HandTable(tmp_path / "t", [old], version=3)
    first = hand.append(pa.table({"a": pa.array([1, 2, None], pa.int32()), "b": ["x", "y", "z"]}))
    hand.schemas.append(new)
    second = hand.append(pa.table({"text": ["x", "y"], "number": [2**40, 1], "a": [5, None], "later": [8, 9]}))

    def rows_of(row_filter: str) -> list[tuple[str, int]]:
        return kept(hand, row_filter)

    assert rows_of("number > 1") == [(first, 1), (second, 0)]
    assert rows_of("text = 'y'") == [(first, 1), (second, 1)]
    assert rows_of("a IS NULL") == [(first, 0), (first, 1), (first, 2), (second, 1)]
    assert rows_of("later = 7 AND number IS NOT NULL") == [(first, 0), (first, 1)]
    assert rows_of("later != 7") == [(second, 0), (second, 1)]
    with pytest.raises(NoSuchColumn, match=r"filter .*found 'b': name one of these"):
        rows_of("b = 'x'")


def test_double_partitions_are_exact(tmp_path: Path) -> None:
    """All 64 bits of a partition value count, for pruning and for the column that the data files lack."""
    spec = PartitionSpec(PartitionField(3, 1000, IdentityTransform(), "x"), spec_id=0)
    hand = HandTable(tmp_path / "t", [SCHEMA], specs=[spec])
    lacking = Schema(*(one for one in SCHEMA.fields if one.name != "x"))
    values = [0.1, 123456789.123, -0.0, None]
    paths = [hand.append(rows([1]), schema=lacking, partition=(value,)) for value in values]
    assert [file.partition_values[3] for file in live_files(hand.table, hand.snapshot_id)] == values
    for row_filter, wanted in {
        "x <= 0.1": [0, 2],
        "x = 123456789.123": [1],
        "x in (0.0)": [2],
        "x is null": [3],
    }.items():
        assert kept(hand, row_filter) == [(paths[place], 0) for place in wanted]
    columns = FileColumns.of(pq.read_schema(paths[1]), SCHEMA, ["x"], partition_values={3: values[1]})
    assert columns.align(pa.table({}), 1)["x"].to_pylist() == [123456789.123]


def test_dotted_names_keep_statistics_apart(tmp_path: Path) -> None:
    """A column whose name is the path of a field in a struct of the file is not taken for that field."""
    inner = StructType(NestedField(3, "x", LongType(), required=False))
    old = Schema(NestedField(1, "s.x", LongType(), required=False), NestedField(2, "t", inner, required=False))
    hand = HandTable(tmp_path / "t", [old])
    table = pa.table({"s.x": [1, 2], "t": [{"x": 100}, {"x": 200}]})
    path = hand.append(table)
    arrow = schema_to_pyarrow(old, include_field_ids=True)
    struct = pa.field("s", arrow.field("t").type, metadata=arrow.field("t").metadata)
    written = pa.Table.from_arrays(table.cast(arrow).columns, schema=pa.schema([arrow.field("s.x"), struct]))
    pq.write_table(written, path)
    assert kept(hand, '"s.x" < 50') == [(path, 0), (path, 1)]
    assert kept(hand, "s.x = 2") == [(path, 1)]
    assert kept(hand, "t.x >= 200") == [(path, 1)]
    assert kept(hand, "s.x > 50") == []


@pytest.mark.parametrize("row_filter", ["x is not nan", "x is nan", "not (x is nan)", "x != 1", "x not in (1)"])
def test_compaction_keeps_the_selection(tmp_path: Path, row_filter: str) -> None:
    """Row groups of nulls alone select what the same rows select among others."""
    apart, together = HandTable(tmp_path / "a", [SCHEMA]), HandTable(tmp_path / "b", [SCHEMA])
    table = rows(list(range(4))).set_column(2, "x", pa.array([None, None, float("nan"), 1.5]))
    apart.append(table, row_group_rows=2)
    together.append(table, row_group_rows=4)
    assert [row for _, row in kept(apart, row_filter)] == [row for _, row in kept(together, row_filter)]
    assert not {0, 1} & {row for _, row in kept(apart, row_filter)}


def test_blank_exclusions_are_refused(tmp_path: Path) -> None:
    """An empty template variable is no exclusion, and does not exclude all rows."""
    hand = HandTable(tmp_path / "t", [SCHEMA])
    hand.append(rows([1, 2]))
    for blank in ("", "  "):
        with pytest.raises(SpecInvalid, match="found the blank"):
            row_groups_of(hand.table, hand.snapshot_id, "", exclude=[blank])
    with pytest.raises(SpecInvalid, match="found the blank"):
        row_groups_of(hand.table, hand.snapshot_id, " ")
