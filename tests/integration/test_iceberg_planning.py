from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from dlac_pipeline.lakehouse.errors import DataFileUnreadable, UnsupportedDeletes, UnsupportedSnapshot
from dlac_pipeline.lakehouse.iceberg.row_groups import row_groups_of
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.conftest import Arena
from tests.integration.iceberg_oracle import live_positions, oracle
from tests.integration.iceberg_writer import HandTable

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "lang", StringType(), required=False))
BY_LANG = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "lang"), spec_id=0)


def rows(count: int, lang: str = "en") -> pa.Table:
    """Rows 0 .. count-1."""
    return pa.table({"id": list(range(count)), "lang": [lang] * count})


def test_table_with_deletes_plans_live_rows(arena: Arena) -> None:
    """In a real catalog positional and equality deletes become dead rows of the plan, as filtered rows do."""
    hand = HandTable(arena.home / "t", [SCHEMA])
    path = hand.append(rows(10))
    hand.delete_positions({path: [0]})
    hand.delete_equal(pa.table({"id": [3, 4]}))
    arena.lakehouse.catalog.register_table("src.t", hand.write_metadata())
    plan = make_plan(arena.lakehouse, SourceSpec(table="src.t", columns=["id"], row_filter="id < 9"))
    assert (plan.row.units, plan.row.rows, plan.row.live_rows) == (3, 10, 6)


def test_files_that_are_not_parquet_are_named(tmp_path: Path) -> None:
    """Data and delete files of other formats are refused with their path and format."""
    for content, error in (
        (DataFileContent.DATA, DataFileUnreadable),
        (DataFileContent.EQUALITY_DELETES, UnsupportedDeletes),
    ):
        hand = HandTable(tmp_path / content.name, [SCHEMA])
        hand.commit([hand.file("the.file", content, (), record_count=1, file_format=FileFormat.ORC)], 0, None)
        with pytest.raises(error, match=r"found ORC at 'the\.file'"):
            row_groups_of(hand.table, hand.snapshot_id, "")


def test_a_dropped_partition_column_leaves_its_files_readable(tmp_path: Path) -> None:
    """The specs of old files name columns that are gone: filters on others, and deletes per partition, still hold."""
    hand = HandTable(tmp_path / "t", [SCHEMA], specs=[BY_LANG, PartitionSpec(spec_id=1)])
    english, german = (hand.append(rows(4, lang), partition=(lang,)) for lang in ("en", "de"))
    hand.delete_equal(pa.table({"id": [1]}), partition=("de",))
    hand.schemas.append(Schema(SCHEMA.fields[0], schema_id=1))
    hand.delete_equal(pa.table({"id": [2]}), spec=1)
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, "")) == oracle(hand.files)
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, "id > 0")) == {english: [1, 3], german: [3]}


def test_path_partition_column_is_read(tmp_path: Path) -> None:
    """A file without its identity-partition column has its value from the partition, also for deletes."""
    hand = HandTable(tmp_path / "t", [SCHEMA], specs=[BY_LANG, PartitionSpec(spec_id=1)])
    bare = Schema(SCHEMA.fields[0])
    english, german = (
        hand.append(rows(3).select(["id"]), schema=bare, partition=(lang,), statistics=False) for lang in ("en", "de")
    )
    hand.delete_equal(pa.table({"id": [1], "lang": ["de"]}), spec=1)
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, "")) == {english: [0, 1, 2], german: [0, 2]}


def test_file_out_of_table_is_named(arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Planning names a data file outside of the table's folder once. A path with ".." is refused."""
    table = arena.lakehouse.catalog.create_table("src.t", SCHEMA)
    pq.write_table(rows(3), tmp_path / "a.parquet")
    table.append(rows(2).cast(SCHEMA.as_arrow()))
    table.add_files([str(tmp_path / "a.parquet")])
    source = SourceSpec(table="src.t", columns=["id"])
    assert make_plan(arena.lakehouse, source).row.live_rows == 5
    named = [record.getMessage() for record in caplog.records if "outside of its folder" in record.getMessage()]
    assert [f"such as {tmp_path / 'a.parquet'}" in each for each in named] == [True]
    table.add_files([f"{tmp_path}/../{tmp_path.name}/a.parquet"])
    with pytest.raises(UnsupportedSnapshot, match=r"without '\.\.' in the manifests of .*/\.\./.*a\.parquet"):
        make_plan(arena.lakehouse, source)
