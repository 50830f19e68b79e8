import datetime as dt
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dlac_pipeline.lakehouse.errors import UnsupportedSnapshot
from tests.conftest import Arena
from tests.extensions.formats.delta_tables import (
    Rows,
    change_first_action,
    commit,
    live_adds,
    newest,
    planned_rows,
    query,
    set_dead_rows,
)

VECTORS = {"delta.enableDeletionVectors": "true"}


def some_rows(start: int, count: int, **more: Any) -> pa.Table:
    """Rows start .. start+count-1."""
    ids = range(start, start + count)
    texts = [None if row % 7 == 0 else f"tëxt {row}" for row in ids]
    days = [dt.date(2024, 1, 1 + row % 3) for row in ids]
    columns = {"id": pa.array(ids, pa.int64()), "text": texts, "day": pa.array(days), "score": [row / 3 for row in ids]}
    return pa.table({**columns, **{name: [value] * count for name, value in more.items()}})


def in_order(rows: Rows) -> Rows:
    """Rows in an order that does not depend on their files."""
    return sorted(rows, key=repr)


def check_all_versions(arena: Arena, location: Path) -> None:
    """Check that each version is read as DataFusion reads it, and of a copy the newest one before the first."""
    versions = range(newest(location) + 1)
    expected = [in_order(query(location, version)) for version in versions]
    copy = location.with_name("copy")
    shutil.copytree(location, copy)
    for place, order in ((location, [*versions, None]), (copy, [None, 0])):
        for version in order:
            wanted = expected[-1 if version is None else version]
            assert in_order(planned_rows(arena.lakehouse, place, version)) == wanted, f"version {version}"


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """The folder of a Delta table. Its name is one that URLs escape."""
    return tmp_path / "a table% ü"


def test_every_version_reads_exactly(arena: Arena, location: Path) -> None:
    """Appends, a new column, an update, a merge, deletes of rows and of files, and compaction."""
    write_deltalake(location, some_rows(0, 20), partition_by=["day"])
    write_deltalake(location, some_rows(40, 20, extra=7), mode="append", schema_mode="merge")
    DeltaTable(location).update({"score": "score + 1000"}, predicate="id % 5 = 0")
    changed = some_rows(55, 10, extra=9)
    merge = DeltaTable(location).merge(changed, "t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    DeltaTable(location).delete("id % 3 = 0")
    DeltaTable(location).delete("day = '2024-01-02'")
    DeltaTable(location).optimize.compact()
    DeltaTable(location).create_checkpoint()
    write_deltalake(location, some_rows(90, 5, extra=1), mode="append")
    check_all_versions(arena, location)


@pytest.mark.slow
def test_partition_values_of_all_types(arena: Arena, location: Path) -> None:
    """Values that paths escape, nulls, an empty text, NaN, dates and times before 1970, decimals and bytes."""
    count = 6
    texts = ["a#b?c", "x y%20", "", "é/ü:", "a=b", None]
    utc = dt.UTC
    partitions = {
        "day": pa.array([dt.date(1969, 7, 20), None, dt.date(9999, 12, 31)] * 2),
        "at": pa.array([dt.datetime(1960, 1, 1, 1, 2, 3, 4, utc), None, dt.datetime(2024, 1, 1, tzinfo=utc)] * 2),
        "local": pa.array([dt.datetime(2024, 2, 29, 1, 2, 3, 456789)] * count, pa.timestamp("us")),
        "number": pa.array([0.1, float("inf"), None] * 2),
        "single": pa.array([0.1, -1.5, None] * 2, pa.float32()),
        "flag": [True, False, None] * 2,
        "tiny": pa.array([-1, 127, None] * 2, pa.int8()),
        "price": pa.array([Decimal("1.10"), Decimal("-3.00"), None] * 2, pa.decimal128(10, 2)),
        "text": texts,
    }
    write_deltalake(location, pa.table({"id": range(count), **partitions}), partition_by=list(partitions))
    found = sorted(planned_rows(arena.lakehouse, location), key=lambda row: row["id"])
    by_datafusion = sorted(query(location, 0), key=lambda row: row["id"])
    assert found == [{**row, "text": row["text"] or None} for row in by_datafusion]
    assert [row["text"] for row in found] == [text or None for text in texts]  # the protocol: an empty text is null
    by_filter = planned_rows(arena.lakehouse, location, row_filter="text = 'a#b?c' OR number > 1.0")
    assert sorted(row["id"] for row in by_filter) == [0, 1, 4]


@pytest.mark.slow
def test_nested_and_rare_columns(arena: Arena, location: Path) -> None:
    """Structs, lists, maps, bytes and times keep their values when a field is added inside a struct."""
    kind = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
    columns = {
        "id": pa.array([1, 2], pa.int64()),
        "nested": pa.array([{"a": 1, "b": ["x", None]}, None], kind),
        "map": pa.array([[("k", 1.5)], []], pa.map_(pa.string(), pa.float64())),
        "bytes": pa.array([b"\x00\xff", None], pa.binary()),
        "short": pa.array([-5, None], pa.int16()),
        "at": pa.array([dt.datetime(1960, 1, 1, 1, 2, 3, 4), None], pa.timestamp("us", "UTC")),
        "local": pa.array([dt.datetime(2024, 2, 29, 1, 2, 3, 456789), None], pa.timestamp("us")),
        "price": pa.array([Decimal("-1.10"), None], pa.decimal128(20, 2)),
    }
    write_deltalake(location, pa.table(columns))
    more = {**columns, "nested": pa.array([{"a": 3, "b": [], "c": 9}, None], pa.struct([*kind, ("c", pa.int64())]))}
    write_deltalake(location, pa.table(more), mode="append", schema_mode="merge")
    check_all_versions(arena, location)


@pytest.mark.slow
@pytest.mark.parametrize("inline", [False, True])
def test_deletion_vectors_hide_rows(arena: Arena, location: Path, inline: bool) -> None:
    """Vectors that begin, grow, shrink and end, of partitions whose paths are escaped, and a compaction after them."""
    texts = {"text": "z/q #?%"}
    write_deltalake(location, some_rows(0, 10, kind="a b"), partition_by=["kind"], configuration=VECTORS)
    write_deltalake(location, some_rows(10, 10, kind=texts["text"]), mode="append")
    first, second = live_adds(location)
    set_dead_rows(location, {first: [0, 4, 9], second: [1]}, inline=inline)
    set_dead_rows(location, {first: [0, 4, 5, 9]}, inline=inline)
    set_dead_rows(location, {first: [4], second: list(range(10))}, inline=inline)
    set_dead_rows(location, {first: [], second: [3]}, inline=inline)
    write_deltalake(location, some_rows(20, 5, kind="a b"), mode="append")
    check_all_versions(arena, location)
    assert len(planned_rows(arena.lakehouse, location, 2)) == 16


def test_vector_beyond_first_bitmap_container(arena: Arena, location: Path) -> None:
    """Dead rows past position 65,536 are in other containers of the bitmap."""
    write_deltalake(location, pa.table({"id": pa.array(range(140_000), pa.int64())}), configuration=VECTORS)
    [path] = live_adds(location)
    dead = [0, 65_535, 65_536, 131_072, 139_999, *range(70_000, 72_000)]
    set_dead_rows(location, {path: dead})
    assert {row["id"] for row in planned_rows(arena.lakehouse, location)} == set(range(140_000)) - set(dead)


WIDER = '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{"delta.typeChanges":[]}}]}'


def test_widened_types_are_refused(arena: Arena, location: Path) -> None:
    """A table that only allows wider types is read. A column whose type was changed is refused."""
    write_deltalake(location, some_rows(0, 3))
    features = {"readerFeatures": ["typeWidening"], "writerFeatures": ["typeWidening"]}
    change_first_action(location, "protocol", minReaderVersion=3, minWriterVersion=7, **features)
    changed = shutil.copytree(location, location.with_name("changed"))
    assert len(planned_rows(arena.lakehouse, location, columns=["id"])) == 3
    change_first_action(changed, "metaData", schemaString=WIDER)
    with pytest.raises(UnsupportedSnapshot, match="typeWidening"):
        planned_rows(arena.lakehouse, changed, columns=["id"])


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("metaData", {"configuration": {"delta.columnMapping.mode": "name"}}, "columnMapping"),
        ("protocol", {"minReaderVersion": 3, "readerFeatures": ["futureThing"]}, "futureThing"),
        ("protocol", {"minReaderVersion": 3, "readerFeatures": ["catalogManaged"]}, "[Cc]atalog-managed"),
    ],
)
def test_features_that_change_rows_are_refused(
    arena: Arena, location: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    """By their name: column mapping, and all that is not known here."""
    write_deltalake(location, some_rows(0, 3))
    features = {"minWriterVersion": 7, "writerFeatures": changes["readerFeatures"]} if kind == "protocol" else {}
    change_first_action(location, kind, **changes, **features)
    with pytest.raises(UnsupportedSnapshot, match=named):
        planned_rows(arena.lakehouse, location, columns=["id"])


@pytest.mark.parametrize("path", ["day=1/%2E./../../a.parquet", "file://{}/../other/a.parquet"])
def test_path_out_of_table_is_refused(arena: Arena, location: Path, path: str) -> None:
    """A log that names a file by a path with "..", encoded or not, is refused, and the message names the path."""
    write_deltalake(location, some_rows(0, 4))
    add = {**next(iter(live_adds(location).values())), "path": path.format(quote(str(location)))}
    commit(location, [{"add": add}])
    with pytest.raises(UnsupportedSnapshot, match=r"without '\.\.' in the log of the Delta table .*\.\..*a\.parquet"):
        planned_rows(arena.lakehouse, location)


@pytest.mark.parametrize("scheme", ["file://", "file:"])
def test_clone_is_read_and_named(arena: Arena, location: Path, caplog: pytest.LogCaptureFixture, scheme: str) -> None:
    """Files that a shallow clone names by absolute addresses are read, and planning names such a file once."""
    origin = location.with_name("origin")
    write_deltalake(origin, some_rows(0, 4))
    write_deltalake(location, some_rows(4, 4))
    (add,) = live_adds(origin).values()
    commit(location, [{"add": {**add, "path": scheme + quote(f"{origin}/{add['path']}")}}])
    assert [row["id"] for row in in_order(planned_rows(arena.lakehouse, location))] == list(range(8))
    named = [record.getMessage() for record in caplog.records if "outside of its folder" in record.getMessage()]
    assert len(named) == 1
    assert f"1 of 2 data files of delta:{location} are outside" in named[0]
    assert add["path"] in named[0]
