from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import BooleanType, DoubleType, IntegerType, LongType, NestedField, StringType, StructType

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid
from dlac_pipeline.lakehouse.filters.grammar import parse_filter
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns
from dlac_pipeline.lakehouse.iceberg.data_files import live_files
from dlac_pipeline.lakehouse.iceberg.row_groups import FilesToRead, row_groups_of
from tests.iceberg_schemas import arrow_fields, optional_fields
from tests.integration.iceberg_oracle import count_aligned_rows, live_positions
from tests.integration.iceberg_writer import HandTable

SCHEMA = Schema(*optional_fields({"n": LongType(), "s": StringType(), "x": DoubleType(), "ok": BooleanType()}))
SPECS = [PartitionSpec(spec_id=0), PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "s"), spec_id=1)]


def rows(numbers: list[int]) -> pa.Table:
    """Return rows that follow from these numbers."""
    made = [{"n": n, "s": f"s{n % 4}", "x": n / 2, "ok": n % 3 == 0} for n in numbers]
    return pa.Table.from_pylist(made, schema=pa.schema(arrow_fields(SCHEMA)))


def kept(hand: HandTable, row_filter: str, **options: Any) -> list[tuple[str, int]]:
    """(file, position) of the live rows under a filter."""
    groups = row_groups_of(hand.table, hand.snapshot_id, row_filter, **options)
    return [(path, row) for path, live in sorted(live_positions(groups).items()) for row in live]


def test_statistics_spare_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group that statistics exclude or prove wholly true is not read; what they leave open is, once."""
    hand = HandTable(tmp_path / "t", [SCHEMA])
    hand.append(rows(list(range(1, 31))), row_group_rows=3, statistics=False)
    read = count_aligned_rows(monkeypatch)
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
    read = count_aligned_rows(monkeypatch)
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
    reads = FilesToRead(only=later, progress=lambda done, total: seen.append((done, total)))
    groups = row_groups_of(hand.table, hand.snapshot_id, "", reads=reads)
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
    assert kept(hand, "number > 1") == [(first, 1), (second, 0)]
    assert kept(hand, "text = 'y'") == [(first, 1), (second, 1)]
    assert kept(hand, "a IS NULL") == [(first, 0), (first, 1), (first, 2), (second, 1)]
    assert kept(hand, "later = 7 AND number IS NOT NULL") == [(first, 0), (first, 1)]
    assert kept(hand, "later != 7") == [(second, 0), (second, 1)]
    with pytest.raises(NoSuchColumn, match=r"filter .*found 'b': name one of these"):
        kept(hand, "b = 'x'")


def test_double_partitions_are_exact(tmp_path: Path) -> None:
    """All 64 bits of a partition value count, for pruning and for the column that the data files lack."""
    spec = PartitionSpec(PartitionField(3, 1000, IdentityTransform(), "x"), spec_id=0)
    hand = HandTable(tmp_path / "t", [SCHEMA], specs=[spec])
    lacking = Schema(*(one for one in SCHEMA.fields if one.name != "x"))
    values = [0.1, 123456789.123, -0.0, None]
    paths = [hand.append(rows([1]), schema=lacking, partition=(value,)) for value in values]
    assert [file.partition_values[3] for file in live_files(hand.table, hand.snapshot_id)] == values
    found = {"x <= 0.1": [0, 2], "x = 123456789.123": [1], "x in (0.0)": [2], "x is null": [3]}
    for row_filter, wanted in found.items():
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


def test_blank_exclusions_are_refused(tmp_path: Path) -> None:
    """An empty template variable is no exclusion. Only an exclusion of all rows excludes them, in place."""
    hand = HandTable(tmp_path / "t", [SCHEMA])
    hand.append(rows([1, 2]))
    for blank in ("", "  "):
        with pytest.raises(SpecInvalid, match="found the blank"):
            row_groups_of(hand.table, hand.snapshot_id, "", exclude=[blank])
    assert [len(one.dead) for one in row_groups_of(hand.table, hand.snapshot_id, "", exclude=["n > 0"])] == [2]
    with pytest.raises(SpecInvalid, match="found the blank"):
        row_groups_of(hand.table, hand.snapshot_id, " ")
