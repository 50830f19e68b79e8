from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.typedef import Record

from catalog.connect import LakehouseConfig, connect
from catalog.data_files import live_files
from catalog.errors import AppendHistoryLost, NoSuchColumn, NoSuchSnapshot, SpecInvalid
from catalog.history import History, OnOverwrite, changes
from catalog.history_steps import TableRows

Keyed = Literal["appends", "identity_columns"]
SCHEMA = pa.schema([("k", pa.int64()), ("name", pa.string()), ("v", pa.int64())])


class _DeleteManifest(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES


@dataclass
class Lake:
    """A table of (k, name, v) and the ways in which engines change it; k is unique among its live rows."""

    home: Path
    name: str = "src.t"

    def __post_init__(self) -> None:
        self.lakehouse = connect(LakehouseConfig().at_home(self.home))
        self.lakehouse.create_namespace("src")

    def create(self, name: str) -> Lake:
        """Go on with a new table."""
        self.name = name
        self.lakehouse.catalog.create_table(name, SCHEMA)
        return self

    @property
    def table(self) -> Table:
        """The table as it is now."""
        return self.lakehouse.load(self.name)

    @property
    def now(self) -> int:
        """The current snapshot's id."""
        current = self.table.current_snapshot()
        assert current is not None
        return current.snapshot_id

    def append(self, *keys: int, v: int = 0) -> int:
        """Append one data file; returns the snapshot."""
        self.table.append(rows_of(keys, v))
        return self.now

    def delete(self, *keys: int) -> int:
        """Delete as pyiceberg does: copy-on-write."""
        self.table.delete(f"k in ({', '.join(map(str, keys))})")
        return self.now

    def rewrite(
        self,
        removed: Iterable[str],
        added: Sequence[pa.Table],
        operation: str = "replace",
        dead: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """One snapshot that swaps data files, adds positional deletes (path -> positions), and says it was `operation`."""
        table = self.table
        gone = set(removed)
        with table.transaction() as transaction:
            producer = transaction.update_snapshot().overwrite()
            for task in table.scan().plan_files():
                if task.file.file_path in gone:
                    producer.delete_data_file(task.file)
            for rows in (rows for rows in added if len(rows)):
                for file in _dataframe_to_data_files(table.metadata, rows, table.io):
                    producer.append_data_file(file)
            _say(producer, operation)
            if dead:
                _with_deletes(producer, table, dead)
            producer.commit()
        return self.now

    def compact(self, *paths: str, operation: str = "replace") -> int:
        """Merge the live rows of some data files (all by default) into one."""
        chosen = list(paths) or self.paths()
        return self.rewrite(chosen, [pa.concat_tables([self.live(self.now, path) for path in chosen])], operation)

    def delete_rows(self, *keys: int) -> int:
        """Delete with a positional delete file."""
        dead: dict[str, list[int]] = {}
        for path in self.paths():
            found = np.flatnonzero(np.isin(read(path)["k"].to_numpy(), keys)).tolist()
            dead |= {path: found} if found else {}
        return self.rewrite([], [], "delete", dead)

    def expire(self, *snapshots: int) -> None:
        """Expire snapshots."""
        self.table.maintenance.expire_snapshots().by_ids(list(snapshots)).commit()

    def paths(self, snapshot: int | None = None) -> list[str]:
        """The live data files."""
        return [file.path for file in live_files(self.table, snapshot or self.now)]

    def live(self, snapshot: int, path: str) -> pa.Table:
        """The live rows of a file in a snapshot."""
        return read(path).filter(pa.array(TableRows(self.table).alive((snapshot, path))))

    def keys(self, snapshot: int | None = None) -> set[int]:
        """The live keys."""
        at = snapshot or self.now
        return {k for path in self.paths(at) for k in self.live(at, path)["k"].to_pylist()}

    def changes(self, since: int, keyed: Keyed = "appends", **options: Any) -> History:
        """What happened since, up to now."""
        columns = ("k",) if keyed == "identity_columns" else ()
        history = changes(self.table, since, self.now, identity_columns=columns, **options)
        assert history.portions is not None  # raises if they are lost
        return history

    def new(self, history: History) -> list[int]:
        """The keys that a run reads of the portions, in order."""
        found: list[int] = []
        for portion in history.portions:
            for path in sorted(portion.files):
                rows = TableRows(self.table).alive((portion.snapshot_id, path))
                rows[history.old_rows(portion.snapshot_id, path)] = False
                found += read(path).filter(pa.array(rows))["k"].to_pylist()
        return found

    def gone(self, history: History) -> set[int] | None:
        """The keys of `since` that are gone; None if that cannot be told of some file."""
        found: set[int] = set()
        for path in self.paths(history.since):
            positions = history.gone(path)
            if positions is None:
                return None
            found |= set(read(path)["k"].to_numpy()[positions].tolist())
        return found


def rows_of(keys: Iterable[int], v: int = 0) -> pa.Table:
    """Rows with these keys."""
    found = list(keys)
    return pa.table([found, [f"row {k}" for k in found], [v] * len(found)], schema=SCHEMA)


def read(path: str) -> pa.Table:
    """A data file, dead rows and all."""
    return pq.read_table(path.removeprefix("file://"))


def _say(producer: Any, operation: str) -> None:
    """Make a snapshot under way say that it was another operation: pyiceberg has no `replace` of its own."""
    summarize = producer._summary

    def summary(*args: Any, **options: Any) -> Summary:
        made = summarize(*args, **options)
        return Summary(Operation(operation), **made.additional_properties)

    producer._summary = summary


def _with_deletes(producer: Any, table: Table, dead: Mapping[str, Sequence[int]]) -> None:
    """Give a snapshot under way a positional delete file: pyiceberg writes none of its own."""
    manifests: Callable[[], list[ManifestFile]] = producer._manifests
    snapshot = producer.snapshot_id
    location = table.location()
    path = f"{location}/data/deletes-{snapshot}.parquet"
    pairs = sorted((file, position) for file, positions in dead.items() for position in positions)
    fields = [("file_path", pa.string(), b"2147483546"), ("pos", pa.int64(), b"2147483545")]
    schema = pa.schema([pa.field(name, kind, False, {"PARQUET:field_id": number}) for name, kind, number in fields])
    target = path.removeprefix("file://")
    pq.write_table(pa.table([list(column) for column in zip(*pairs, strict=True)], schema=schema), target)
    file = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(pairs),
        file_size_in_bytes=Path(target).stat().st_size,
    )

    def with_deletes() -> list[ManifestFile]:
        output = table.io.new_output(f"{location}/metadata/deletes-{snapshot}.avro")
        with _DeleteManifest(table.spec(), table.schema(), output, snapshot, "deflate") as writer:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=snapshot,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=file,
                )
            )
        return [*manifests(), writer.to_manifest_file()]

    producer._manifests = with_deletes


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """An empty table."""
    return Lake(tmp_path / "home").create("src.t")


def test_nothing_happened(lake: Lake) -> None:
    """From a snapshot to itself nothing is new and nothing is gone."""
    since = lake.append(1, 2)
    history = lake.changes(since)
    assert (history.steps, history.portions, lake.gone(history)) == ((), (), set())


def test_appended_files_are_read_as_they_are_now(lake: Lake) -> None:
    """Files appended since are read in the snapshot that is gone on with, with its deletes applied."""
    since = lake.append(1, 2, 3)
    lake.append(4, 5)
    lake.append(6)
    until = lake.delete_rows(2, 4)
    history = lake.changes(since)
    assert [step.operation for step in history.steps] == ["append", "append", "delete"]
    assert history.to_pin == (until,)
    assert sorted(lake.new(history)) == [5, 6]
    assert lake.gone(history) == {2}


@pytest.mark.parametrize("keyed", ["appends", "identity_columns"])
def test_a_compaction_brings_no_row_twice(lake: Lake, keyed: Keyed) -> None:
    """Compacting planned files brings nothing, and takes nothing away."""
    since = lake.append(1, 2, 3)
    lake.append(4)
    lake.compact()
    history = lake.changes(since, keyed)
    assert lake.new(history) == [4]
    assert lake.gone(history) == set()
    assert (history.to_pin == (lake.now,)) == (keyed == "identity_columns")


def test_a_compaction_of_planned_files_only_leaves_nothing_to_read(lake: Lake) -> None:
    """Files that hold planned rows only are in no portion, and rows of files that did not move need no keys."""
    lake.append(1, 1)
    since = lake.append(2)
    [moved] = [path for path in lake.paths() if len(read(path)) == 1]
    lake.compact(moved)
    history = lake.changes(since, "identity_columns")
    assert (history.portions, lake.gone(history)) == ((), set())


def test_files_compacted_among_themselves_are_read_now(lake: Lake) -> None:
    """Appended files that were merged with each other only need no snapshot in between, even if those are expired."""
    since = lake.append(1, 2)
    between = [lake.append(3), lake.append(4)]
    fresh = [path for path in lake.paths() if path not in lake.paths(since)]
    lake.compact(*fresh)
    lake.append(5)
    history = lake.changes(since)
    assert history.to_pin == (lake.now,)
    assert sorted(lake.new(history)) == [3, 4, 5]
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    lake.expire(*between)
    assert sorted(lake.new(lake.changes(since))) == [3, 4, 5]


def test_deletes_before_a_compaction_are_gone(lake: Lake) -> None:
    """Without keys, rows that were deleted before a compaction dropped them are known to be gone."""
    since = lake.append(1, 2, 3)
    lake.delete_rows(2)
    lake.compact()
    assert lake.gone(lake.changes(since)) == {2}


@pytest.mark.parametrize("how", ["delete", "delete_rows"])
def test_deletes_behind_a_compaction_need_keys(lake: Lake, how: str) -> None:
    """Rows deleted from a rewritten file can be told with keys; without, the answer is that it cannot be told."""
    since = lake.append(1, 2, 3)
    lake.append(4)
    lake.compact()
    getattr(lake, how)(2)
    if how == "delete_rows":
        history = lake.changes(since)
        assert lake.gone(history) is None
        assert lake.new(history) == [4]
    keyed = lake.changes(since, "identity_columns")
    assert (lake.gone(keyed), lake.new(keyed)) == ({2}, [4])


def test_a_compaction_that_calls_itself_an_overwrite(lake: Lake) -> None:
    """With keys a compaction written as an overwrite is seen to bring nothing; without, it stops a run."""
    since = lake.append(1, 2)
    lake.append(3)
    lake.compact(operation="overwrite")
    history = lake.changes(since, "identity_columns")
    assert (lake.new(history), lake.gone(history)) == ([3], set())
    with pytest.raises(AppendHistoryLost, match=r"found an overwrite, snapshot .*declare identity_columns"):
        lake.changes(since)


def test_a_delete_by_pyiceberg_is_no_overwrite(lake: Lake) -> None:
    """With keys the rewritten rest of a copy-on-write delete is recognized as old rows; without, it stops a run."""
    since = lake.append(1, 2, 3)
    lake.append(4, 5)
    lake.delete(2, 5)
    assert lake.table.snapshots()[-1].summary.operation == Operation.OVERWRITE  # type: ignore[union-attr]  # it has one
    history = lake.changes(since, "identity_columns")
    assert (lake.new(history), lake.gone(history)) == ([4], {2})
    with pytest.raises(AppendHistoryLost, match="overwrite"):
        lake.changes(since)


def test_whole_files_that_are_deleted_need_no_keys(lake: Lake) -> None:
    """Dropping whole files takes away exactly their rows, and appended files that were dropped are not read."""
    first = lake.append(1, 2)
    since = lake.append(3)
    lake.append(4)
    lake.append(5)
    lake.delete(1, 2, 4)
    assert first != since
    history = lake.changes(since)
    assert (lake.new(history), lake.gone(history)) == ([5], {1, 2})


def overwritten(lake: Lake) -> int:
    """Row 1 is consumed or planned, 2 is overwritten by 7, 3 stays in the rewritten file; 4 came before, 8 afterwards."""
    since = lake.append(1, 2, 3)
    [path] = lake.paths()
    lake.append(4)
    lake.rewrite([path], [rows_of([1, 3, 7])], "overwrite")
    lake.append(8)
    return since


def test_overwrites_stop_a_run_that_did_not_ask_for_them(lake: Lake) -> None:
    """Under "stop" an overwrite with new rows is an error that says what to do, keys or no keys."""
    since = overwritten(lake)
    for keyed in ("appends", "identity_columns"):
        with pytest.raises(AppendHistoryLost, match="set on_overwrite to 'read' or 'ignore'"):
            lake.changes(since, keyed)
    with pytest.raises(AppendHistoryLost, match="which brings 1 new rows"):
        lake.changes(since, "identity_columns")


def test_overwrites_that_are_read(lake: Lake) -> None:
    """Under "read" keys give exactly the rows that came and went; without keys the written files are read whole."""
    since = overwritten(lake)
    history = lake.changes(since, "identity_columns", on_overwrite="read")
    assert (sorted(lake.new(history)), lake.gone(history)) == ([4, 7, 8], {2})
    whole = lake.changes(since, on_overwrite="read")
    assert (sorted(lake.new(whole)), lake.gone(whole)) == ([1, 3, 4, 7, 8], {1, 2, 3})


@pytest.mark.parametrize("keyed", ["appends", "identity_columns"])
def test_overwrites_that_are_ignored(lake: Lake, keyed: Keyed) -> None:
    """Under "ignore" nothing that an overwrite brought is read, and nothing that it took is left out, whatever follows."""
    since = overwritten(lake)
    for _ in range(2):
        history = lake.changes(since, keyed, on_overwrite="ignore")
        assert (sorted(lake.new(history)), lake.gone(history)) == ([4, 8], set())
        lake.compact()


@pytest.mark.parametrize("keyed", ["appends", "identity_columns"])
def test_appended_rows_that_an_ignored_overwrite_took_are_read(lake: Lake, keyed: Keyed) -> None:
    """Under "ignore" appended files are read as they were before an overwrite took them, from a snapshot to be pinned."""
    since = lake.append(1)
    before = lake.append(2, 3)
    lake.rewrite([path for path in lake.paths() if path not in lake.paths(since)], [rows_of([3, 9])], "overwrite")
    history = lake.changes(since, keyed, on_overwrite="ignore")
    assert (lake.new(history), history.to_pin) == ([2, 3], (before,))


def test_rows_updated_by_merge_on_read(lake: Lake) -> None:
    """An overwrite that deletes rows by position and writes them anew brings only rows whose identity is new."""
    since = lake.append(1, 2, 3)
    lake.append(4, 5)
    paths = {k: path for path in lake.paths() for k in lake.live(lake.now, path)["k"].to_pylist()}
    lake.rewrite([], [rows_of([2, 4, 9], v=1)], "overwrite", {paths[2]: [1], paths[4]: [0]})
    history = lake.changes(since, "identity_columns", on_overwrite="read")
    assert (sorted(lake.new(history)), lake.gone(history)) == ([4, 5, 9], set())
    whole = lake.changes(since, on_overwrite="read")
    assert (sorted(lake.new(whole)), lake.gone(whole)) == ([2, 4, 5, 9], {2})
    ignored = lake.changes(since, on_overwrite="ignore")
    assert (sorted(lake.new(ignored)), lake.gone(ignored)) == ([4, 5], set())


@pytest.mark.parametrize("policy", ["stop", "ignore"])
def test_updates_that_bring_no_identity_are_no_news(lake: Lake, policy: OnOverwrite) -> None:
    """With keys an overwrite that writes known rows anew stops nothing: each row counts once, in its old or new place."""
    since = lake.append(1, 2, 3)
    lake.append(4, 5)
    paths = {k: path for path in lake.paths() for k in lake.live(lake.now, path)["k"].to_pylist()}
    lake.rewrite([], [rows_of([2, 4], v=1)], "overwrite", {paths[2]: [0, 1], paths[4]: [0]})
    history = lake.changes(since, "identity_columns", on_overwrite=policy)
    assert (sorted(lake.new(history)), lake.gone(history)) == ([4, 5], {1})


@pytest.mark.parametrize("policy", ["read", "ignore"])
def test_a_removal_by_an_overwrite_is_a_delete(lake: Lake, policy: OnOverwrite) -> None:
    """With keys an overwrite that provably only removed rows takes them away under every policy."""
    since = lake.append(1, 2, 3)
    lake.append(4, 5)
    lake.delete(2, 5)
    history = lake.changes(since, "identity_columns", on_overwrite=policy)
    assert (lake.new(history), lake.gone(history)) == ([4], {2})


def test_a_row_that_is_deleted_and_appended_again(lake: Lake) -> None:
    """A deleted row that is appended again is gone and new; merged with what the old one was merged with, it is the same."""
    since = lake.append(1, 2)
    lake.delete_rows(2)
    lake.append(2)
    history = lake.changes(since, "identity_columns")
    assert (lake.new(history), lake.gone(history)) == ([2], {2})
    lake.compact()
    history = lake.changes(since, "identity_columns")
    assert (lake.new(history), lake.gone(history)) == ([], set())


def test_expired_appends_are_read_while_planned_files_are_there(lake: Lake) -> None:
    """Snapshots in between may expire: as long as the planned files are there, what is not of them is new."""
    since = lake.append(1, 2)
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    between = [lake.append(3), lake.append(4)]
    lake.append(5)
    lake.expire(*between)
    history = lake.changes(since)
    assert [step.operation for step in history.steps] == ["gap", "append"]
    assert (sorted(lake.new(history)), lake.gone(history)) == ([3, 4, 5], set())


def test_expired_rewrites_need_keys(lake: Lake) -> None:
    """If planned files were rewritten in snapshots that are expired, keys tell new rows from old; without, it is an error."""
    since = lake.append(1, 2)
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    between = [lake.append(3), lake.delete_rows(1), lake.compact()]
    lake.append(4)
    lake.expire(*between)
    history = lake.changes(since, "identity_columns")
    assert (sorted(lake.new(history)), lake.gone(history)) == ([3, 4], {1})
    with pytest.raises(AppendHistoryLost, match=r"found some expired.*declare identity_columns"):
        lake.changes(since)


def test_expired_deletes_may_hide_updates(lake: Lake) -> None:
    """Rows deleted in expired snapshots, beside files added: an update cannot be excluded, so keys or "read" are asked for."""
    since = lake.append(1, 2)
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    between = [lake.append(3), lake.delete_rows(1)]
    lake.append(4)
    lake.expire(*between)
    with pytest.raises(AppendHistoryLost, match="rows deleted"):
        lake.changes(since)
    for history in (lake.changes(since, "identity_columns"), lake.changes(since, on_overwrite="read")):
        assert (sorted(lake.new(history)), lake.gone(history)) == ([3, 4], {1})


def test_the_snapshot_before_a_merge_is_expired(lake: Lake) -> None:
    """Appended files that were merged with planned ones cannot be read once the snapshot before is expired."""
    since = lake.append(1)
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    between = lake.append(2)
    lake.compact()
    lake.expire(between)
    with pytest.raises(AppendHistoryLost, match=r"found it expired"):
        lake.changes(since)
    assert lake.new(lake.changes(since, "identity_columns")) == [2]


def test_a_rolled_back_table_is_another_history(lake: Lake) -> None:
    """A snapshot that does not descend from the planned one is refused, also if snapshots in between are expired."""
    first = lake.append(1)
    second = lake.append(2)
    lake.table.manage_snapshots().create_tag(second, "pin").rollback_to_snapshot(first).commit()
    third = lake.append(3)
    with pytest.raises(AppendHistoryLost, match="rolled back"):
        lake.changes(second)
    lake.append(4)
    lake.expire(first, third)
    with pytest.raises(AppendHistoryLost, match=r"to descend|new rows cannot be told"):
        lake.changes(second)


def test_a_rollback_over_a_delete_is_noticed(lake: Lake) -> None:
    """Files older than the planned snapshot, but not of it, show a rollback whose snapshots are expired."""
    first = lake.append(1)
    lake.append(2)
    planned = lake.delete(1)
    before = lake.table.snapshot_by_id(planned).parent_snapshot_id  # type: ignore[union-attr]  # it is there
    assert before is not None
    lake.table.manage_snapshots().create_tag(planned, "pin").rollback_to_snapshot(before).commit()
    third = lake.append(3)
    lake.append(4)
    lake.expire(first, before, third)
    with pytest.raises(AppendHistoryLost, match="older data file"):
        lake.changes(planned)


def test_what_is_gone_is_told_after_history_is_lost(lake: Lake) -> None:
    """If what came cannot be told any more, files that are where they were still say which of their rows are gone."""
    lake.append(1, 2, 3)
    since = lake.append(4, 5)
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    paths = {k: path for path in lake.paths() for k in lake.live(lake.now, path)["k"].to_pylist()}
    between = [lake.append(6), lake.compact(paths[4])]
    lake.delete_rows(2)
    lake.expire(*between)
    history = changes(lake.table, since, lake.now)
    with pytest.raises(AppendHistoryLost):
        assert history.portions
    gone = history.gone(paths[1])
    assert gone is not None
    assert (gone.tolist(), history.gone(paths[4])) == ([1], None)
    ignoring = changes(lake.table, since, lake.now, on_overwrite="ignore")
    assert ignoring.gone(paths[1]) is None


def test_unknown_snapshots(lake: Lake) -> None:
    """An expired start is a lost history; an unknown end is a wrong request."""
    since = lake.append(1)
    until = lake.append(2)
    with pytest.raises(NoSuchSnapshot):
        changes(lake.table, since, 1)
    lake.expire(since)
    with pytest.raises(AppendHistoryLost, match="found it expired"):
        changes(lake.table, since, until)


def test_identity_columns_must_exist_and_tell_rows_apart(lake: Lake) -> None:
    """A missing identity column and a double identity are errors that name them."""
    since = lake.append(1, 2, 2)
    lake.append(3)
    lake.compact()
    with pytest.raises(NoSuchColumn, match="'nope'"):
        changes(lake.table, since, lake.now, identity_columns=["nope"])
    with pytest.raises(SpecInvalid, match=r"found \{'k': 2\} twice in snapshot \d+ of .*src.t': row 1 of .* and row 2"):
        lake.new(lake.changes(since, "identity_columns"))


def test_several_identity_columns_with_nulls(lake: Lake) -> None:
    """Identity may take several columns of any type; null is a value like others."""
    since = lake.append(1, 2)
    lake.table.append(pa.table([[1, None], [None, "row 1"], [0, 0]], schema=SCHEMA))
    lake.compact()
    history = changes(lake.table, since, lake.now, identity_columns=["k", "name"])
    assert (lake.new(history), lake.gone(history)) == ([1, None], set())


def test_identity_follows_a_renamed_column(lake: Lake) -> None:
    """Identity columns are found by field id: a rename and a drop in between change nothing."""
    since = lake.append(1, 2)
    lake.append(3)
    with lake.table.update_schema() as update:
        update.rename_column("k", "key").delete_column("v")
    [planned] = lake.paths(since)
    rows = rows_of([3, 2]).drop_columns(["v"]).rename_columns(["key", "name"])
    lake.rewrite(lake.paths(), [rows])
    history = changes(lake.table, since, lake.now, identity_columns=["key"])
    gone = history.gone(planned)
    assert gone is not None
    assert gone.tolist() == [0]
    assert history.old_rows(lake.now, lake.paths()[0]).tolist() == [1]


def test_a_rewrite_that_changes_the_identity_is_noticed(lake: Lake) -> None:
    """A compaction whose rows have identities of their own did not keep what tells rows apart."""
    since = lake.append(1, 2)
    lake.rewrite(lake.paths(), [rows_of([8, 9])])
    with pytest.raises(AppendHistoryLost, match="found 2 rows with values of their own"):
        lake.gone(lake.changes(since, "identity_columns"))


def test_a_replace_that_brings_rows_is_refused(lake: Lake) -> None:
    """A replace may lose deleted rows; one that has more rows than before is no rewrite."""
    since = lake.append(1, 2)
    lake.rewrite(lake.paths(), [rows_of([1, 2, 3])])
    with pytest.raises(AppendHistoryLost, match="makes 3 rows of 2"):
        lake.changes(since)


Change = tuple[str, int, int]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "delete_rows", "drop", "compact", "delete", "overwrite", "update", "pin"]),
        st.integers(0, 99),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=9,
)


class Story:
    """A random history of a table, and what a plain model says of it."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.next = 0
        self.live: dict[int, set[int]] = {}
        """Snapshot -> keys, by the model."""
        self.keys: set[int] = set()
        self.brought: set[int] = set()
        self.tell("append", 0, 3)
        self.tell("append", 0, 2)
        self.since = lake.now
        lake.table.manage_snapshots().create_tag(self.since, "pin").commit()
        self.brought.clear()

    def tell(self, what: str, where: int, count: int) -> None:
        """Change the table and the model alike."""
        known = sorted(self.keys)
        chosen = {known[(where * 7 + place) % len(known)] for place in range(count)} if known else set()
        paths = sorted(self.lake.paths(), key=lambda path: read(path).to_pydict()["k"]) if self.live else []
        some = list(dict.fromkeys(paths[(where + place) % len(paths)] for place in range(count))) if paths else []
        fresh = list(range(self.next, self.next + count))
        if what == "append":
            self.lake.append(*fresh)
            self._came(fresh)
        elif what in ("delete_rows", "delete") and chosen:
            getattr(self.lake, what)(*chosen)
            self.keys -= chosen
        elif what == "drop" and some:
            self.keys -= {k for path in some for k in self.lake.live(self.lake.now, path)["k"].to_pylist()}
            self.lake.rewrite(some, [], "delete")
        elif what == "compact" and some:
            self.lake.compact(*some, operation="replace")
        elif what == "overwrite" and some:
            kept = pa.concat_tables([self.lake.live(self.lake.now, path) for path in some])
            self.keys -= set(kept["k"].to_pylist()[:1])
            self.lake.rewrite(some, [pa.concat_tables([kept.slice(1), rows_of(fresh)])], "overwrite")
            self._came(fresh)
        elif what == "update" and some:
            rows = TableRows(self.lake.table)
            first = {path: np.flatnonzero(rows.alive((self.lake.now, path)))[:1].tolist() for path in some}
            dead = {path: at for path, at in first.items() if at}
            again = [k for path, at in dead.items() for k in read(path)["k"].to_numpy()[at].tolist()]
            if dead:
                self.lake.rewrite([], [rows_of(again + fresh, v=1)], "overwrite", dead)
                self._came(fresh)
        if self.lake.table.current_snapshot():
            self.live[self.lake.now] = set(self.keys)

    def _came(self, fresh: list[int]) -> None:
        self.next += len(fresh)
        self.keys |= set(fresh)
        self.brought |= set(fresh)

    def expire_some(self, every: int) -> None:
        """Expire some of the snapshots in between."""
        between = [
            s.snapshot_id for s in self.lake.table.snapshots() if s.snapshot_id not in (self.since, self.lake.now)
        ]
        if every and between:
            self.lake.expire(*between[::every])

    def check(self, history: History, *, exact: bool) -> None:
        """What the history says is what the model says."""
        before, after = self.live[self.since], self.keys
        found, gone = self.lake.new(history), self.lake.gone(history)
        assert len(found) == len(set(found)), "a row came twice"
        assert set(found) >= after - before, "a new row is not read"
        assert set(found) <= (after - before if exact else self.brought), "a row is read that is not new"
        assert gone == before - after or (not exact and gone is None)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lakehouse in which every example makes a table of its own."""
    return Lake(tmp_path_factory.mktemp("shelf") / "home")


SLOW = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def new_story(shelf: Lake) -> Story:
    """A story of a new table."""
    return Story(shelf.create(f"src.t{len(shelf.lakehouse.catalog.list_tables('src'))}"))


@SLOW
@given(told=CHANGES, expiry=st.integers(0, 3))
def test_any_history_with_identity_columns(shelf: Lake, told: list[Change], expiry: int) -> None:
    """With identity columns, any history gives exactly the rows that came and those that went, also past expiry."""
    story = new_story(shelf)
    for change in told:
        story.tell(*change)
    assert shelf.keys() == story.keys
    story.expire_some(expiry)
    try:
        history = shelf.changes(story.since, "identity_columns", on_overwrite="read")
    except AppendHistoryLost:
        assert expiry, "history was lost though all of it is there"
        return
    story.check(history, exact=True)


@SLOW
@given(told=CHANGES, keyed=st.sampled_from(["appends", "identity_columns"]))
def test_any_history_with_overwrites_ignored(shelf: Lake, told: list[Change], keyed: Keyed) -> None:
    """With overwrites ignored every row that was appended and not deleted is read once, and only deleted ones are gone."""
    story = new_story(shelf)
    appended, deleted = set[int](), set[int]()
    for change in told:
        before, first = set(story.keys), story.next
        story.tell(*change)
        if change[0] == "append":
            appended |= set(range(first, story.next))
        if change[0] in ("delete", "delete_rows", "drop"):
            deleted |= before - story.keys
    history = shelf.changes(story.since, keyed, on_overwrite="ignore")
    found, gone = shelf.new(history), shelf.gone(history)
    assert len(found) == len(set(found)), "a row came twice"
    assert appended - deleted <= set(found) <= appended
    assert gone is None or gone <= deleted & story.live[story.since]


@SLOW
@given(told=CHANGES, expiry=st.integers(0, 3))
def test_any_history_without_keys(shelf: Lake, told: list[Change], expiry: int) -> None:
    """Without keys, histories without overwrites give every new row once, and tell what is gone or that they cannot."""
    story = new_story(shelf)
    for change in told:
        if change[0] not in ("delete", "overwrite", "update"):
            story.tell(*change)
    story.expire_some(expiry)
    try:
        history = shelf.changes(story.since)
    except AppendHistoryLost:
        assert expiry, "history was lost though all of it is there"
        return
    story.check(history, exact=False)
