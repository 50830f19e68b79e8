import pytest

from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from tests.extensions.history.history_lake import Keyed, Lake, read, read_from, rows_of


def test_appended_files_are_read_as_they_are_now(lake: Lake) -> None:
    """Files appended since are read in the snapshot that is gone on with, with its deletes applied."""
    since = lake.append(1, 2, 3)
    assert lake.changes(since).steps == ()
    lake.append(4, 5)
    lake.append(6)
    until = lake.delete_rows(2, 4)
    history = lake.changes(since)
    assert [step.operation for step in history.steps] == ["append", "append", "delete"]
    assert read_from(history) == (until,)
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
    assert (read_from(history) == (lake.now,)) == (keyed == "identity_columns")


def test_compaction_of_planned_files_adds_nothing(lake: Lake) -> None:
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
    assert read_from(history) == (lake.now,)
    assert sorted(lake.new(history)) == [3, 4, 5]
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    lake.expire(*between)
    assert sorted(lake.new(lake.changes(since))) == [3, 4, 5]


@pytest.mark.parametrize("how", ["delete", "delete_rows"])
def test_deletes_behind_a_compaction_need_keys(lake: Lake, how: str) -> None:
    """Rows deleted from a rewritten file are found with keys, and else unknown. Those deleted before it are known."""
    since = lake.append(1, 2, 3)
    lake.append(4)
    lake.delete_rows(3)
    lake.compact()
    assert lake.gone(lake.changes(since)) == {3}
    getattr(lake, how)(2)
    if how == "delete_rows":
        history = lake.changes(since)
        assert lake.gone(history) is None
        assert lake.new(history) == [4]
    keyed = lake.changes(since, "identity_columns")
    assert (lake.gone(keyed), lake.new(keyed)) == ({2, 3}, [4])


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


def test_a_replace_that_brings_rows_is_refused(lake: Lake) -> None:
    """A replace may lose deleted rows; one that has more rows than before is no rewrite."""
    since = lake.append(1, 2)
    lake.rewrite(lake.paths(), [rows_of([1, 2, 3])])
    with pytest.raises(AppendHistoryLost, match="makes 3 rows of 2"):
        lake.changes(since)
