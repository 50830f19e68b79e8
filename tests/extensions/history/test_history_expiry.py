import pytest

from dlac_pipeline.extensions.history.changes import changes
from dlac_pipeline.lakehouse.errors import AppendHistoryLost, NoSuchSnapshot
from tests.extensions.history.history_lake import Lake


def test_expired_appends_are_still_read(lake: Lake) -> None:
    """Snapshots in between may expire: while the planned files exist, rows of all other files are new."""
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


def test_overwrite_with_expired_parent_is_no_delete(lake: Lake) -> None:
    """An overwrite with an expired parent may have brought rows: a cautious run stops, and "read" continues exactly."""
    since = lake.append(1)
    between = lake.append(2, 3)
    lake.table.manage_snapshots().create_tag(since, "pin").commit()
    lake.delete(2)
    lake.expire(between)
    with pytest.raises(
        AppendHistoryLost, match=r"'read' or 'ignore', or keep snapshots until every run has seen them$"
    ):
        lake.changes(since, "identity_columns")
    assert lake.new(lake.changes(since, "identity_columns", on_overwrite="read")) == [3]


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
    with pytest.raises(AppendHistoryLost, match=r"to descend|new rows cannot be distinguished"):
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


def test_unknown_snapshots(lake: Lake) -> None:
    """An expired start is a lost history; an unknown end is a wrong request."""
    since = lake.append(1)
    until = lake.append(2)
    with pytest.raises(NoSuchSnapshot):
        changes(lake.table, since, 1)
    lake.expire(since)
    with pytest.raises(AppendHistoryLost, match="found it expired"):
        changes(lake.table, since, until)
