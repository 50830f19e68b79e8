"""Values as the pinned snapshot defines them: timestamps, partition values, names and shapes of tensors, ids, schemas."""

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, IcebergType, IntegerType, LongType, NestedField, StringType, TimestampType

from dlac_pipeline.extensions.dataset import DlacDataset, open_dataset
from dlac_pipeline.lakehouse.errors import DataFileUnreadable, NoSuchColumn, NoSuchSnapshot, UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger.plans import get_plan
from dlac_pipeline.plan.plan import Plan
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.read.blocks import open_decoder
from dlac_pipeline.spec.job_spec import SourceSpec


def made(lakehouse: Lakehouse, *files: pa.Table, **properties: str) -> Table:
    """The table `src.t` of these files."""
    lakehouse.catalog.create_table("src.t", files[0].schema, properties=properties)
    for rows in files:
        lakehouse.load("src.t").append(rows)
    return lakehouse.load("src.t")


def data_files(table: Table) -> list[Path]:
    """The table's data files, in the order in which they were appended."""
    tasks = table.scan().plan_files()
    return sorted(
        (Path(task.file.file_path.removeprefix("file://")) for task in tasks), key=lambda at: at.stat().st_mtime_ns
    )


def opened(lakehouse: Lakehouse, *columns: str, **settings: Any) -> DlacDataset:
    """A dataset over `src.t`."""
    defaults: dict[str, Any] = {"batch_size": 4, "key_groups": 2, "shuffle": False}
    return open_dataset(lakehouse=lakehouse, table="src.t", columns=list(columns), **{**defaults, **settings})


LAST = dt.datetime(9999, 12, 31, 23, 59, 59, 999999)
FAR = [LAST, dt.datetime(1, 1, 1), dt.datetime(2262, 4, 12), dt.datetime(2000, 1, 1)]


def test_int96_timestamps_of_any_year(lakehouse: Lakehouse) -> None:
    """Timestamps that old writers stored as INT96 have the written values, in tensors and under a filter."""
    instants = pa.array([each.replace(tzinfo=dt.UTC) for each in FAR], pa.timestamp("us", "UTC"))
    rows = pa.table({"id": range(4), "t": pa.array(FAR, pa.timestamp("us")), "u": instants})
    (path,) = data_files(made(lakehouse, rows))
    pq.write_table(pq.read_table(path), path, use_deprecated_int96_timestamps=True)
    assert pq.read_metadata(path).schema.column(1).physical_type == "INT96"
    (batch,) = opened(lakehouse, "id", "t", "u")
    wanted = rows["t"].cast(pa.int64()).to_numpy()[batch["id"].numpy()]
    assert batch["t"].tolist() == batch["u"].tolist() == wanted.tolist()
    for text, ids in (
        ("t > '9000-01-01T00:00:00'", [0]),
        ("t < '1700-01-01T00:00:00'", [1]),
        ("t = '2262-04-12T00:00:00'", [2]),
    ):
        assert sorted(row for batch in opened(lakehouse, "id", row_filter=text) for row in batch["id"].tolist()) == ids
        excluded = [row for batch in opened(lakehouse, "id", exclude=[text]) for row in batch["id"].tolist()]
        assert sorted(excluded) == sorted({0, 1, 2, 3} - set(ids))


VALUES: dict[str, tuple[IcebergType, Any, Any]] = {
    "number": (LongType(), 7, 7),
    "small": (IntegerType(), -3, -3),
    "day": (DateType(), dt.date(2020, 1, 2), (dt.date(2020, 1, 2) - dt.date(1970, 1, 1)).days),
    "instant": (TimestampType(), dt.datetime(1969, 12, 31, 23, 59, 59), -1_000_000),
}


def partitioned(lakehouse: Lakehouse, kind: IcebergType, *parts: Any) -> list[Path]:
    """Make `src.t` with a data file of three rows for each partition, which lacks their column. Return the files."""
    schema = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "part", kind, required=True))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "part"))
    lakehouse.catalog.create_table("src.t", schema, partition_spec=spec)
    table = lakehouse.load("src.t")
    for part in parts:
        table.append(pa.table({"id": range(3), "part": [part] * 3}, schema=table.schema().as_arrow()))
    paths = data_files(table)
    for path in paths:
        pq.write_table(pq.read_table(path, partitioning=None).drop_columns(["part"]), path)
    return paths


@pytest.mark.parametrize("name", VALUES)
def test_partition_column_absent_from_files(lakehouse: Lakehouse, name: str) -> None:
    """A column that data files lack, as files of Hive do, is the file's identity partition value, also where it is required."""
    kind, value, wanted = VALUES[name]
    partitioned(lakehouse, kind, value)
    found = [pair for batch in opened(lakehouse, "id", "part") for pair in zip(batch["id"], batch["part"], strict=True)]
    assert sorted((int(row), int(part)) for row, part in found) == [(row, wanted) for row in range(3)]


def test_partition_values_of_every_plan(lakehouse: Lakehouse) -> None:
    """A file of an earlier plan, gone from the snapshot that was planned last, keeps its partition value."""
    paths = partitioned(lakehouse, LongType(), 1, 2)
    table = lakehouse.load("src.t")
    before = snapshot_of(table, None).snapshot_id
    table.delete("part = 1")
    [source] = opened(lakehouse, "id", "part").leg.sources
    after = source.snapshot_id
    assert after != before
    decoder = open_decoder(table, source, [before, after])
    assert decoder.row_group(f"file://{paths[0]}", 0, 3)["part"].to_pylist() == [1, 1, 1]
    with pytest.raises(DataFileUnreadable, match="found it in none"):
        open_decoder(table, source, [after]).row_group(f"file://{paths[0]}", 0, 3)


TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "string": ({"v": ["a"] * 4, "v.offsets": range(4)}, {}),
    "nullable": ({"y": [1, None, 2, 3], "y.valid": range(4)}, {"nullable": ["y"]}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_tensor_names_that_collide(lakehouse: Lakehouse, name: str) -> None:
    """A column with the name of what another column yields is refused by both names, when planning; alone it is read."""
    columns, settings = TAKEN[name]
    made(lakehouse, pa.table({key: pa.array(value) for key, value in columns.items()}))
    with pytest.raises(
        UnsupportedColumn,
        match=rf"from columns '{min(columns)}' and '{max(columns)}', found '{max(columns)}' from both",
    ):
        opened(lakehouse, *columns, **settings)
    (batch,) = opened(lakehouse, max(columns))
    assert max(columns) in batch


def lists(*rows: Any) -> pa.Table:
    """Rows with lists."""
    return pa.table({"x": pa.array(rows, pa.list_(pa.int32()))})


def shapes(lakehouse: Lakehouse, world_size: int, **settings: Any) -> list[list[tuple[int, ...]]]:
    """The shape of `x` in every batch, by rank."""
    shared: dict[str, Any] = {"world_size": world_size, "last_batch": "pad", **settings}
    readers = [opened(lakehouse, "x", rank=rank, **shared) for rank in range(world_size)]
    return [[tuple(batch["x"].shape) for batch in reader] for reader in readers]


@pytest.mark.parametrize(("empty", "rest", "width"), [(None, [1, 2, 3], 3), (None, None, 0)])
def test_width_of_nullable_lists(
    lakehouse: Lakehouse, empty: list[int] | None, rest: list[int] | None, width: int
) -> None:
    """Ranks whose rows are all null have tensors as wide as every rank's, wherever the first list of the plan is, if any."""
    made(lakehouse, lists(*[None] * 8), lists(*[None] * 7, empty), lists(*[rest] * 16))
    for world_size in (1, 4):
        found = shapes(lakehouse, world_size, nullable=["x"], key_groups=4)
        assert found == [[(4 // world_size, width)] * 8] * world_size


@pytest.mark.parametrize("nullable", [True, False])
def test_other_width_is_refused_by_rank(lakehouse: Lakehouse, nullable: bool) -> None:
    """Lists of another length than the plan's first are refused by the rank that has them, though all of its rows have it."""
    made(lakehouse, lists(*[[1, 2]] * 8), lists(*[[1, 2, 3]] * 8))
    more = {"nullable": ["x"]} if nullable else {}
    with pytest.raises(
        UnsupportedColumn, match=r"lists of length [23] in column 'x', as the first list of the plan has, found .* [23]"
    ):
        shapes(lakehouse, 2, **more)


@pytest.mark.parametrize("row_filter", ["x IS NOT NULL", "kept = true"])
def test_dead_rows_shape_nothing(lakehouse: Lakehouse, row_filter: str) -> None:
    """Nulls, and lists of other lengths, in rows that the filter drops are not looked at."""
    dead = [None, None] if "NULL" in row_filter else [[1, 2, 3], [9]]
    rows = lists(dead[0], [1, 2], dead[1], [3, 4]).append_column("kept", pa.array([False, True, False, True]))
    made(lakehouse, rows)
    (batch,) = opened(lakehouse, "x", row_filter=row_filter)
    assert sorted(batch["x"].tolist()) == [[1, 2], [3, 4]]


@pytest.mark.parametrize("snapshot_id", [-(2**63), 0, 5])
def test_any_long_may_name_a_snapshot(lakehouse: Lakehouse, snapshot_id: int) -> None:
    """An id that the table lacks is refused, and the error lists the table's ids, since Iceberg allows ids of any sign."""
    known = made(lakehouse, pa.table({"id": range(4)})).snapshots()[0].snapshot_id
    with pytest.raises(NoSuchSnapshot, match=rf"expected snapshot {snapshot_id} in .*found only \[{known}\]"):
        opened(lakehouse, "id", version=snapshot_id)


def planned(lakehouse: Lakehouse, *columns: str, **settings: Any) -> Plan:
    """A plan of `src.t`."""
    return make_plan(lakehouse, SourceSpec(table="src.t", columns=list(columns), **settings))


def test_plan_binds_the_schema_of_its_snapshot(lakehouse: Lakehouse) -> None:
    """Columns and filters follow the pinned snapshot, before and after later commits. The error names the way to newer ones."""
    table = made(lakehouse, pa.table({"id": range(4), "old": range(4)}))
    first = make_plan(lakehouse, SourceSpec(table="src.t", columns=["id", "old"], row_filter="old > 1"))
    with table.update_schema() as update:
        update.rename_column("old", "new")
        update.add_column("later", StringType())
    again = make_plan(lakehouse, SourceSpec(table="src.t", columns=["id", "old"], row_filter="old > 1"))
    assert again.row.plan_id == first.row.plan_id
    assert get_plan(lakehouse, again.row.plan_id).schema_id == 0
    for column, row_filter in (("new", None), ("later", None), ("id", "new > 1")):
        for read in (planned, opened):
            with pytest.raises(
                NoSuchColumn,
                match="was written with schema 0, and the table has a newer schema, 1, with that name: name",
            ):
                read(lakehouse, column, row_filter=row_filter)
    for column, row_filter in (("typo", None), ("id", "typo > 1")):
        with pytest.raises(NoSuchColumn) as caught:
            opened(lakehouse, column, row_filter=row_filter)
        assert "newer schema" not in str(caught.value)
    lakehouse.load("src.t").append(pa.table({"id": [9], "new": [9], "later": ["x"]}))
    wanted = SourceSpec(table="src.t", columns=["id", "old"], row_filter="old > 1", version=first.row.snapshot_id)
    assert make_plan(lakehouse, wanted).row == first.row
    (batch,) = opened(lakehouse, "id", "new", row_filter="new > 2")
    assert sorted(batch["new"].tolist()) == [3, 9]
