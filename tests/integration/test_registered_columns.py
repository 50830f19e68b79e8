"""Columns of registered Parquet files: every value as pyarrow reads it, or the column is left out or refused by name."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlac_pipeline.extensions.registration.register import Registered, register
from dlac_pipeline.lakehouse.errors import SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.files.parquet import open_parquet
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, name_mapping_of
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.conftest import Arena

_OTHER_NAMES = {b"list": b"bags", b"element": b"item_no", b"key_value": b"map_pairs"}
_NESTED = {
    "many": pa.array([[1, None], [], None, [3]], pa.list_(pa.int64())),
    "deep": pa.array([[[1.5], []], None, [], [None, [2.5, 3.5]]], pa.list_(pa.list_(pa.float64()))),
    "maps": pa.array([[("a", 1)], [], None, [("b", None)]], pa.map_(pa.string(), pa.int32())),
    "structs": pa.array([[{"x": 1}], None, [], [{"x": None}]], pa.list_(pa.struct([("x", pa.int32())]))),
}


def registered(arena: Arena, folder: Path) -> Registered:
    """Register a folder as docs.pages."""
    return register(arena.lakehouse, "docs.pages", str(folder))


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def values_of(lakehouse: Lakehouse) -> dict[str, list[Any]]:
    """Return the values of docs.pages as training decodes them, in the order of the files' names."""
    table = lakehouse.load("docs.pages")
    names, mapping = [field.name for field in table.schema().fields], name_mapping_of(table)
    parts = []
    for path in sorted(task.file.file_path for task in table.scan().plan_files()):
        with table.io.new_input(path).open() as stream:
            file = open_parquet(stream, table.schema().fields)
            columns = FileColumns.of(file.schema_arrow, table.schema(), names, mapping)
            parts.append(columns.align(file.read(columns=columns.in_file), file.metadata.num_rows))
    whole: dict[str, list[Any]] = pa.concat_tables(parts).to_pydict()
    return whole


@pytest.mark.parametrize("form", ["item", "renamed"])
def test_list_forms_are_read(arena: Arena, tmp_path: Path, form: str) -> None:
    """Lists and maps whose groups have other names than Iceberg's keep their values, beside files of the standard form."""
    written = {"row_id": list(range(4)), **_NESTED}
    write(tmp_path / "pages/a.parquet", written)
    other = write(tmp_path / "pages/b.parquet", written, use_compliant_nested_type=False, store_schema=False)
    if form == "renamed":
        content = write(other, written, store_schema=False).read_bytes()
        length = int.from_bytes(content[-8:-4], "little")
        footer = content[-8 - length :]
        for name, renamed in _OTHER_NAMES.items():  # repeated groups, and their elements, as old writers name them
            footer = footer.replace(name, renamed)
        other.write_bytes(content[: -8 - length] + footer)
    assert max(other.read_bytes().find(name) for name in (b"item_no", b"item")) > 0
    done = registered(arena, tmp_path / "pages")
    assert (done.added_rows, done.left_out) == (8, ())
    own = pq.read_table(other).to_pydict()
    assert values_of(arena.lakehouse) == {name: 2 * values for name, values in own.items()}
    assert arena.lakehouse.load("docs.pages").scan().to_arrow()["many"].to_pylist() == 2 * own["many"]


def test_equal_types_are_registered(arena: Arena, tmp_path: Path) -> None:
    """Types that Iceberg has under another name keep their values. The greatest values are found by a filter."""
    columns = {
        "row_id": [0, 1],
        "u8": pa.array([0, 255], pa.uint8()),
        "u32": pa.array([1, 2**32 - 1], pa.uint32()),
        "half": pa.array([0.5, None], pa.float16()),
        "berlin": pa.array([1, 10**15], pa.timestamp("us", "Europe/Berlin")),
        "ms": pa.array([1, None], pa.timestamp("ms")),
        "clock": pa.array([1, 86_399_999], pa.time32("ms")),
        "small": pa.array([1, 2], pa.decimal32(5, 2)),
        "word": pa.array(["a", "b"]).dictionary_encode(),
        "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1], pa.int8())),
    }
    path = write(tmp_path / "pages/a.parquet", columns)
    assert registered(arena, tmp_path / "pages").left_out == ()
    found, own = values_of(arena.lakehouse), pq.read_table(path).to_pydict()
    assert {**found, "flag": None} == {**own, "flag": None}
    assert found["flag"] == [0, 1]
    source = SourceSpec(
        table="docs.pages", columns=["row_id"], row_filter=f"u32 = {2**32 - 1} AND berlin > '2001-01-01'"
    )
    assert make_plan(arena.lakehouse, source, write=False).row.live_rows == 1


@pytest.mark.parametrize("int96", [False, True])
def test_whole_microseconds_are_registered(arena: Arena, tmp_path: Path, int96: bool) -> None:
    """Timestamps in nanoseconds and INT96 are timestamps of the table if no digit is lost. Null rows and zones are kept."""
    times = pa.array([1_000, None, -5_000_000], pa.timestamp("ns"))
    zoned = pa.array([1_000, None, 0], pa.timestamp("ns", "UTC"))
    many = pa.array([times.to_pylist()] * 3, pa.list_(times.type))
    columns = {"row_id": [0, 1, 2], "at": times, "zoned": zoned, "many": many}
    write(tmp_path / "pages/a.parquet", columns, use_deprecated_int96_timestamps=int96, store_schema=not int96)
    assert registered(arena, tmp_path / "pages").left_out == ()
    found = values_of(arena.lakehouse)
    own = pq.read_table(tmp_path / "pages/a.parquet", coerce_int96_timestamp_unit="us")
    assert found["many"] == own["many"].cast(pa.list_(pa.timestamp("us"))).to_pylist()
    assert found["at"] == own["at"].cast(pa.timestamp("us")).to_pylist()


@pytest.mark.parametrize("int96", [False, True])
def test_lost_digits_are_left_out(arena: Arena, tmp_path: Path, int96: bool) -> None:
    """A column with digits below a microsecond is left out by name, also when later files have none. The others are read."""
    options: dict[str, Any] = {"use_deprecated_int96_timestamps": int96}
    write(tmp_path / "pages/a.parquet", {"row_id": [0], "at": pa.array([1_001], pa.timestamp("ns"))}, **options)
    first = registered(arena, tmp_path / "pages")
    assert len(first.left_out) == 1
    assert all(word in first.left_out[0] for word in ("'at'", "microseconds", "a.parquet"))
    write(tmp_path / "pages/b.parquet", {"row_id": [1], "at": pa.array([2_000], pa.timestamp("ns"))}, **options)
    assert registered(arena, tmp_path / "pages").left_out == first.left_out
    assert values_of(arena.lakehouse) == {"row_id": [0, 1]}


def test_unfit_columns_are_left_out(arena: Arena, tmp_path: Path) -> None:
    """Columns that Iceberg cannot have are left out, each with its reason and file. One that is all null waits for a type."""
    names, small = ["row_id", "twice", "twice", "wide", "lasts", "later"], [pa.array([number]) for number in range(3)]
    odd = [pa.array([3], pa.uint64()), pa.array([4], pa.duration("s")), pa.nulls(1)]
    unfit = pa.Table.from_arrays([*small, *odd], names=names)
    (tmp_path / "pages").mkdir()
    pq.write_table(unfit, tmp_path / "pages/a.parquet")
    done = registered(arena, tmp_path / "pages")
    assert [each.partition(":")[0] for each in done.left_out] == ["'lasts'", "'twice'", "'wide'"]
    assert all("a.parquet" in each for each in done.left_out)
    write(tmp_path / "pages/b.parquet", {"row_id": [1], "wide": [5], "later": ["now"]})
    registered(arena, tmp_path / "pages")
    assert values_of(arena.lakehouse) == {"row_id": [0, 1], "later": [None, "now"]}


@pytest.mark.parametrize(
    ("name", "n", "message"),
    [
        ("b", ["x"], r"one type of column 'n'.*found string in '.*b\.parquet' and long in the table"),
        ("day=1/b", [1], r"partition keys.*\[\] for the table and \['day'\] for '.*b\.parquet'"),
    ],
)
def test_later_contradiction_is_refused(arena: Arena, tmp_path: Path, name: str, n: Any, message: str) -> None:
    """A second registration that contradicts the table names file and column, and adds no file."""
    write(tmp_path / "pages/a.parquet", {"row_id": [0], "n": [7]})
    first = registered(arena, tmp_path / "pages")
    write(tmp_path / f"pages/{name}.parquet", {"row_id": [1], "n": n})
    with pytest.raises(SpecInvalid, match=message):
        registered(arena, tmp_path / "pages")
    head = arena.lakehouse.load("docs.pages").current_snapshot()
    assert head is not None
    assert head.snapshot_id == first.snapshot_id


def test_file_without_table_is_refused(arena: Arena, tmp_path: Path) -> None:
    """Files without a column that fits make no table."""
    write(tmp_path / "pages/a.parquet", {"wide": pa.array([1], pa.uint64())})
    with pytest.raises(UnsupportedColumn, match=r"'wide'.*uint64.*a\.parquet"):
        registered(arena, tmp_path / "pages")


@pytest.mark.parametrize("greatest", ["\U0010ffff" * 17, "b" * 16 + "\ud7ff"])
def test_long_texts_are_bounded(arena: Arena, tmp_path: Path, greatest: str) -> None:
    """A file is registered whatever its greatest text is, and a filter for this text finds its row."""
    columns = {"row_id": [0, 1, 2], "text": ["a" * 40, greatest, None], "raw": [b"", greatest.encode(), b"\xff" * 20]}
    write(tmp_path / "pages/a.parquet", columns)
    registered(arena, tmp_path / "pages")
    for row_filter in (
        f"text = '{greatest}'",
        f"text >= '{greatest}'",
        "text < 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab'",
    ):
        source = SourceSpec(table="docs.pages", columns=["row_id"], row_filter=row_filter)
        assert make_plan(arena.lakehouse, source, write=False).row.live_rows == 1


@pytest.mark.parametrize(
    ("folder", "key", "value"),
    [("a%3Db=1%2F2", "a=b", "1/2"), ("day=\u0663\u0664", "day", "\u0663\u0664"), ("day=007", "day", 7)],
)
def test_partition_keys_are_decoded(arena: Arena, tmp_path: Path, folder: str, key: str, value: Any) -> None:
    """An encoded character is part of a key or a value. Only digits of ASCII make a number."""
    write(tmp_path / f"pages/{folder}/a.parquet", {"row_id": [0]})
    registered(arena, tmp_path / "pages")
    assert arena.lakehouse.load("docs.pages").scan().to_arrow().to_pylist() == [{"row_id": 0, key: value}]
