from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, IntegerType, LongType, NestedField, StringType

from dlac_pipeline.lakehouse.errors import DataFileUnreadable, DlacError, NoSuchSnapshot, UnsupportedDeletes
from dlac_pipeline.lakehouse.iceberg.data_files import DeleteFile, live_files
from dlac_pipeline.lakehouse.iceberg.deletes import decode_vector, matching_rows
from dlac_pipeline.lakehouse.iceberg.own_rows import read_rows
from dlac_pipeline.lakehouse.iceberg.row_groups import row_groups_of
from tests.integration.iceberg_oracle import count_aligned_rows, live_positions, oracle
from tests.integration.iceberg_writer import HandTable, named_blob, puffin_footer, vector_blob

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "score", DoubleType(), required=False),
)
BY_NAME = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"), spec_id=0)


def rows(ids: Sequence[int | None], name: str | None = None) -> pa.Table:
    """Rows with these ids; names and scores follow from them, or all have one name."""
    names = [name if name is not None else None if one is None else f"n{one % 3}" for one in ids]
    scores = [None if one is None or one % 5 == 0 else one / 2 for one in ids]
    return pa.table(
        {"id": pa.array(ids, pa.int64()), "name": pa.array(names, pa.string()), "score": pa.array(scores, pa.float64())}
    )


def equal(**columns: list[Any]) -> pa.Table:
    """Rows to delete by equality."""
    types = {"id": pa.int64(), "name": pa.string(), "score": pa.float64()}
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})


def check(hand: HandTable) -> dict[str, list[int]]:
    """The live positions, after comparing them with DuckDB's."""
    live = live_positions(row_groups_of(hand.table, hand.snapshot_id, ""))
    assert live == oracle(hand.files)
    return live


@pytest.fixture
def hand(tmp_path: Path) -> HandTable:
    """An unpartitioned table."""
    return HandTable(tmp_path / "t", [SCHEMA])


@pytest.fixture
def vectored(tmp_path: Path) -> HandTable:
    """A table of format v3, which can have deletion vectors."""
    return HandTable(tmp_path / "t", [SCHEMA], version=3)


@pytest.mark.parametrize(("bounds", "referenced"), [(False, False), (True, False), (False, True)])
def test_positional_deletes_spare_younger_files(hand: HandTable, bounds: bool, referenced: bool) -> None:
    """The delete applies to data of the same sequence number and older, whether or not its metadata name the file."""
    path = hand.append(rows(range(10)))
    hand.delete_positions({path: [0, 4, 9]}, bounds=bounds, referenced=referenced)
    assert check(hand)[path] == [1, 2, 3, 5, 6, 7, 8]
    hand.delete_positions({path: [1]}, sequence=1, bounds=bounds, referenced=referenced)
    assert check(hand)[path] == [2, 3, 5, 6, 7, 8]
    hand.delete_positions({path: [2]}, sequence=0, bounds=bounds, referenced=referenced)
    assert check(hand)[path] == [2, 3, 5, 6, 7, 8]


def test_equality_deletes_take_older_rows_only(hand: HandTable) -> None:
    """A row written again with or after the delete lives; null equals null; every column must be equal."""
    old = hand.append(rows([1, 2, 3, None, 5]))
    hand.delete_equal(equal(id=[2, None]))
    new = hand.append(rows([2, None, 7]))
    hand.delete_equal(equal(id=[2, 3], name=["n2", "other"]))
    assert check(hand) == {old: [0, 2, 4], new: [1, 2]}
    same = hand.append(rows([9]), sequence=9)
    hand.delete_equal(equal(id=[9]), sequence=9)
    assert check(hand)[same] == [0]


def test_not_a_number_equals_itself() -> None:
    """NaN is deleted by NaN, alone and beside other columns."""
    nan = float("nan")
    data = pa.table({"a": [1.0, nan, None, nan], "b": [1, 1, 1, 2]})
    assert matching_rows(data.select(["a"]), pa.table({"a": [nan]})).tolist() == [1, 3]
    assert matching_rows(data, pa.table({"a": [nan, None], "b": [1, 1]})).tolist() == [1, 2]


def test_deletes_within_a_partition_leave_the_others_alone(tmp_path: Path) -> None:
    """Equality and positional deletes of a partition apply there. Deletes of an unpartitioned spec apply everywhere."""
    hand = HandTable(tmp_path / "t", [SCHEMA], specs=[BY_NAME, PartitionSpec(spec_id=1)])
    a = hand.append(rows([1, 2, 3], "a"), partition=("a",))
    b = hand.append(rows([1, 2, 3], "b"), partition=("b",))
    null = hand.append(rows([1, 2, 3]), partition=(None,))
    hand.delete_equal(equal(id=[1]), partition=("a",))
    hand.delete_equal(equal(id=[2]), partition=(None,))
    assert check(hand) == {a: [1, 2], b: [0, 1, 2], null: [0, 2]}
    hand.delete_equal(equal(id=[3]), spec=1)
    assert check(hand) == {a: [1], b: [0, 1], null: [0]}
    hand.delete_positions({b: [0]}, partition=("b",))
    assert check(hand)[b] == [1]


def test_deletion_vectors_replace_positional_deletes(vectored: HandTable) -> None:
    """One Puffin file holds vectors of several data files; a file with a vector ignores positional delete files."""
    hand = vectored
    first, second, third = (hand.append(rows(range(8))) for _ in range(3))
    hand.delete_positions({first: [0], third: [7]})
    hand.delete_vectors({first: [1, 2], second: [0, 7]})
    assert check(hand) == {first: [0, 3, 4, 5, 6, 7], second: [1, 2, 3, 4, 5, 6], third: [0, 1, 2, 3, 4, 5, 6]}
    hand.delete_equal(equal(id=[5]))
    assert check(hand)[first] == [0, 3, 4, 6, 7]


def test_positions_past_32_bits_are_read() -> None:
    """The second map of a 64-bit roaring bitmap holds positions from 2^32 on."""
    positions = [0, 7, 2**32 + 1, 2**33]
    vector = DeleteFile(path="p", rows=4, sequence_number=1, offset=4, size_bytes=1)
    assert decode_vector(vector_blob(positions), vector).tolist() == positions


def foot(vector: bytes, offset: int = 4) -> bytes:
    """The footer of a Puffin file with one deletion vector."""
    return puffin_footer([named_blob(offset, len(vector))])


def with_flipped_bit(blob: bytes) -> bytes:
    """A Puffin file whose vector is damaged."""
    return b"PFA1" + blob[:16] + bytes([blob[16] ^ 1]) + blob[17:] + foot(blob)


NO_FIELDS = puffin_footer([{"type": "deletion-vector-v1"}])
DAMAGED, UNSUPPORTED = DataFileUnreadable, UnsupportedDeletes
CONTAINERS: dict[str, tuple[Callable[[bytes], bytes], type[DlacError], str]] = {
    "bare": (lambda blob: bytes(4) + blob, UNSUPPORTED, "found a bare one at"),
    "unnamed": (lambda blob: b"PFA1" + blob + puffin_footer([]), UNSUPPORTED, r"in the footer of .*, found \[\]"),
    "other place": (lambda blob: b"PFA1" + blob + foot(blob, offset=5), UNSUPPORTED, "in the footer of"),
    "flipped bit": (with_flipped_bit, DAMAGED, r"a deletion vector at byte 4 of .*vectors\.puffin"),
    "no fields": (lambda blob: b"PFA1" + blob + NO_FIELDS, DAMAGED, r"file .*vectors\.puffin.* found .*fields"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_vector_outside_puffin_is_refused(vectored: HandTable, name: str) -> None:
    """A vector whose file is no Puffin file, or does not name it, is refused. Damage is named with the file."""
    contain, error, message = CONTAINERS[name]
    path = vectored.append(rows(range(8)))
    Path(vectored.delete_vectors({path: [1, 2]})).write_bytes(contain(vector_blob([1, 2])))
    with pytest.raises(error, match=message):
        row_groups_of(vectored.table, vectored.snapshot_id, "")


def test_own_rows_honor_deletes(hand: HandTable) -> None:
    """Another engine may have deleted rows of one of DLAC's tables. pyiceberg then reads it."""
    hand.delete_positions({hand.append(rows(range(8))): [1, 2]})
    assert read_rows(hand.table, AlwaysTrue()).num_rows == 6


def test_vector_that_no_format_allows(tmp_path: Path) -> None:
    """Vectors in a table of format v2, in a file that is called Parquet, and without Puffin's format are refused."""
    hand = HandTable(tmp_path / "v2", [SCHEMA], version=3)
    hand.delete_vectors({hand.append(rows(range(8))): [1]})
    hand.version = 2
    with pytest.raises(UnsupportedDeletes, match=r"found one in a table of format v2, at .*vectors\.puffin"):
        row_groups_of(hand.table, hand.snapshot_id, "")
    hand = HandTable(tmp_path / "v3", [SCHEMA], version=3)
    hand.delete_vectors({hand.append(rows(range(8))): [1]}, file_format=FileFormat.PARQUET)
    with pytest.raises(UnsupportedDeletes, match="found one in a file of format PARQUET"):
        row_groups_of(hand.table, hand.snapshot_id, "")


def test_row_ids_are_inherited_from_the_manifest(vectored: HandTable) -> None:
    """A v3 file without a first row id follows the files before it in its manifest; v2 has none."""
    first, second = vectored.append(rows(range(6))), vectored.append(rows(range(5)))
    own = vectored.append(rows(range(3)), row_id=500)
    found = {file.path: file.first_row_id for file in live_files(vectored.table, vectored.snapshot_id)}
    assert found == {first: 0, second: 6, own: 500}


def test_a_live_file_says_which_snapshot_added_it(hand: HandTable) -> None:
    """Path, rows and snapshot equal the manifest entry's."""
    path = hand.append(rows(range(6)), sequence=1)
    hand.append(rows(range(2)))
    (file,) = (one for one in live_files(hand.table, hand.snapshot_id) if one.path == path)
    assert (file.rows, file.snapshot_id, file.first_row_id) == (6, 1001, None)
    with pytest.raises(NoSuchSnapshot, match=r"snapshot 42 .* \[1001, 1002\]"):
        live_files(hand.table, 42)
    with pytest.raises(NoSuchSnapshot, match="snapshot 42 "):
        live_files(hand.table, 42, schema=SCHEMA)


def test_a_row_group_without_live_rows_is_listed(hand: HandTable) -> None:
    """All rows dead is a row group with no live row; time travel to before the delete finds them all."""
    hand.append(rows(range(8)))
    before = hand.snapshot_id
    hand.delete_equal(equal(id=[0, 1, 2, 3]))
    assert [len(one.dead) for one in row_groups_of(hand.table, hand.snapshot_id, "")] == [4, 0]
    assert [(len(one.dead), one.dead.dtype.name) for one in row_groups_of(hand.table, before, "")] == [(0, "int64")] * 2


def test_equality_deletes_by_a_dropped_column_hold(tmp_path: Path) -> None:
    """A delete names field ids: it holds after its column was renamed, widened, dropped, and its name given away."""
    first = Schema(NestedField(1, "id", IntegerType(), required=False), NestedField(2, "a", StringType()), schema_id=0)
    hand = HandTable(tmp_path / "t", [first])
    path = hand.append(pa.table({"id": pa.array([1, 2, 3], pa.int32()), "a": ["x", "y", "z"]}))
    hand.delete_equal(pa.table({"a": ["y"]}))
    renamed = Schema(NestedField(1, "key", LongType(), required=False), NestedField(3, "a", LongType()), schema_id=1)
    hand.schemas.append(renamed)
    hand.delete_equal(pa.table({"key": pa.array([3], pa.int64())}))
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, "")) == {path: [0]}


def test_equality_deletes_know_defaults_of_later_columns(vectored: HandTable) -> None:
    """A row older than a column has its initial default there, or null, and is deleted by that value."""
    hand = vectored
    path = hand.append(rows([1, 2]))
    more = (NestedField(4, "plain", LongType(), required=False), NestedField(5, "seven", LongType(), initial_default=7))
    hand.schemas.append(Schema(*SCHEMA.fields, *more, schema_id=1))
    hand.delete_equal(pa.table({"id": [1], "plain": pa.array([None], pa.int64())}))
    hand.delete_equal(pa.table({"id": [2], "seven": [8]}))
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, "")) == {path: [1]}
    hand.delete_equal(pa.table({"id": [2], "seven": [7]}))
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, "")) == {path: []}


def test_a_delete_file_without_its_columns_is_refused(hand: HandTable) -> None:
    """A delete that cannot be understood is never passed over."""
    hand.append(rows([1, 2]))
    hand.delete_equal(equal(id=[1]).rename_columns(["id"]), ids=False)
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, ""))
    other = Schema(NestedField(9, "unknown", LongType(), required=False))
    hand.delete_equal(pa.table({"unknown": [1]}), schema=other)
    with pytest.raises(UnsupportedDeletes, match=r"field ids \(9,\)"):
        row_groups_of(hand.table, hand.snapshot_id, "")


@pytest.mark.parametrize("kind", ["positions", "equal", "vectors"])
def test_a_missing_delete_file_is_named(vectored: HandTable, kind: str) -> None:
    """Rows that were deleted are not read because a delete file is gone."""
    hand = vectored
    path = hand.append(rows(range(4)))
    deletes: dict[str, Callable[..., str]] = {"positions": hand.delete_positions, "vectors": hand.delete_vectors}
    made = deletes[kind]({path: [1]}) if kind in deletes else hand.delete_equal(equal(id=[1]))
    Path(made).unlink()
    with pytest.raises(DataFileUnreadable, match=made):
        row_groups_of(hand.table, hand.snapshot_id, "")


def test_only_possible_row_groups_are_read(hand: HandTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of the deleted columns spare row groups and files; what they leave is read once."""
    hand.append(rows(range(40)), row_group_rows=4)
    hand.append(rows(range(100, 120)), row_group_rows=4)
    hand.delete_equal(equal(id=[9, 10]))
    aligned = count_aligned_rows(monkeypatch)
    assert live_positions(row_groups_of(hand.table, hand.snapshot_id, "")) == oracle(hand.files)
    assert aligned == [2, 4]  # the delete file, and the row group of rows 8 to 11


IDS = st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=12)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "positions", "equal", "pair", "vectors"]), IDS, st.integers(0, 3)), max_size=9
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, data=st.data())
def test_any_delete_history_equals_duckdb(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, list[int | None], int]], data: st.DataObject
) -> None:
    """Every kind of delete, in any order, with sequence numbers before and after the data's."""
    hand = HandTable(tmp_path_factory.mktemp("t"), [SCHEMA], version=3)
    paths, with_vector = [hand.append(rows(range(10)))], set()
    for what, ids, back in operations:
        path = data.draw(st.sampled_from(paths))
        sequence = max(1, hand.sequence + 1 - back)
        positions = sorted({one for one in ids if one is not None})
        if what == "append":
            paths.append(hand.append(rows(ids), sequence=sequence, row_group_rows=3))
        elif what == "equal":
            hand.delete_equal(equal(id=ids), sequence=sequence)
        elif what == "pair":
            hand.delete_equal(rows(ids).select(["name", "score"]), sequence=sequence)
        elif what == "positions" and positions:
            hand.delete_positions({path: positions}, sequence=sequence, bounds=back == 1)
        elif what == "vectors" and positions and path not in with_vector:
            with_vector.add(path)
            hand.delete_vectors({path: positions})
    check(hand)
