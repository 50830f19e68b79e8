import pytest
from pyiceberg.table.snapshots import Operation

from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from dlac_pipeline.plan.legs.changes import OnOverwrite
from tests.extensions.history.history_lake import Keyed, Lake, read_from, rows_of


def test_a_compaction_that_calls_itself_an_overwrite(lake: Lake) -> None:
    """With keys a compaction written as an overwrite is seen to bring nothing; without, it stops a run."""
    since = lake.append(1, 2)
    lake.append(3)
    lake.compact(operation="overwrite")
    history = lake.changes(since, "identity_columns")
    assert (lake.new(history), lake.gone(history)) == ([3], set())
    with pytest.raises(AppendHistoryLost, match=r"found an overwrite, snapshot .*declare identity_columns"):
        lake.changes(since)


@pytest.mark.parametrize("policy", ["stop", "read", "ignore"])
def test_a_delete_by_pyiceberg_is_no_overwrite(lake: Lake, policy: OnOverwrite) -> None:
    """With keys the rewritten rest of a copy-on-write delete is old rows under every policy; without, it stops a run."""
    since = lake.append(1, 2, 3)
    lake.append(4, 5)
    lake.delete(2, 5)
    assert lake.table.snapshots()[-1].summary.operation == Operation.OVERWRITE  # type: ignore[union-attr]  # it has one
    history = lake.changes(since, "identity_columns", on_overwrite=policy)
    assert (lake.new(history), lake.gone(history)) == ([4], {2})
    with pytest.raises(AppendHistoryLost, match="overwrite"):
        lake.changes(since)


def overwritten(lake: Lake) -> int:
    """Row 1 is consumed or planned, 2 is overwritten by 7, 3 stays in the rewritten file; 4 came before, 8 afterwards."""
    since = lake.append(1, 2, 3)
    [path] = lake.paths()
    lake.append(4)
    lake.rewrite([path], [rows_of([1, 3, 7])], "overwrite")
    lake.append(8)
    return since


def test_overwrite_stops_run_by_default(lake: Lake) -> None:
    """Under "stop" an overwrite with new rows is an error that names a remedy, with keys or without."""
    since = overwritten(lake)
    with pytest.raises(AppendHistoryLost, match="set on_overwrite to 'read' or 'ignore'"):
        lake.changes(since)
    with pytest.raises(AppendHistoryLost, match=r"which brings 1 new rows.*set on_overwrite to 'read' or 'ignore'"):
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
def test_appended_rows_survive_ignored_overwrite(lake: Lake, keyed: Keyed) -> None:
    """Under "ignore" appended files are read as they were before an overwrite took them, from a snapshot to be pinned."""
    since = lake.append(1)
    before = lake.append(2, 3)
    lake.rewrite([path for path in lake.paths() if path not in lake.paths(since)], [rows_of([3, 9])], "overwrite")
    history = lake.changes(since, keyed, on_overwrite="ignore")
    assert (lake.new(history), read_from(history)) == ([2, 3], (before,))


@pytest.mark.parametrize("policy", ["stop", "ignore"])
def test_updates_that_bring_no_identity_are_no_news(lake: Lake, policy: OnOverwrite) -> None:
    """With keys an overwrite that writes known rows again stops nothing: each row counts once, in its old or new place."""
    since = lake.append(1, 2, 3)
    lake.append(4, 5)
    paths = {k: path for path in lake.paths() for k in lake.live(lake.now, path)["k"].to_pylist()}
    lake.rewrite([], [rows_of([2, 4], v=1)], "overwrite", {paths[2]: [0, 1], paths[4]: [0]})
    history = lake.changes(since, "identity_columns", on_overwrite=policy)
    assert (sorted(lake.new(history)), lake.gone(history)) == ([4, 5], {1})
