"""Commits that are repeated beside other writers: pins, and new columns of DLAC's tables."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import CommitTableResponse
from pyiceberg.table.update import RemoveSnapshotRefUpdate
from pyiceberg.types import StringType

from dlac_pipeline.lakehouse.errors import CommitConflict, FormatTooNew, NoSuchSnapshot, PinLost
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.iceberg.pins import hold, remove_pin
from dlac_pipeline.lakehouse.iceberg.safe_commit import GuardedSqlCatalog
from dlac_pipeline.lakehouse.iceberg.snapshots import pin, pin_tag, snapshot_of
from dlac_pipeline.lakehouse.retrying import retrying

ROWS = pa.table({"k": pa.array([1, 2, 3], pa.int64())})
LOST = 5
"""How many races are lost in a row before one is won."""
Commit = Callable[..., CommitTableResponse]


@pytest.fixture
def lakehouse(lakehouse: Lakehouse) -> Lakehouse:
    """A lakehouse with an empty source table."""
    lakehouse.catalog.create_table("src.t", ROWS.schema)
    return lakehouse


def append(lakehouse: Lakehouse) -> int:
    """Append a data file; returns the snapshot."""
    lakehouse.load("src.t").append(ROWS)
    return snapshot_of(lakehouse.load("src.t"), None).snapshot_id


def losing(monkeypatch: pytest.MonkeyPatch, races: Iterator[bool]) -> None:
    """Let commits lose a race for each true value, and win afterwards."""
    commit: Commit = GuardedSqlCatalog.commit_table

    def commit_table(*request: Any) -> CommitTableResponse:
        if next(races, False):
            raise CommitConflict("somebody was faster")
        return commit(*request)

    monkeypatch.setattr(GuardedSqlCatalog, "commit_table", commit_table)


def test_pins_work_beside_busy_writers(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that loses one race after another is repeated, with pauses."""
    snapshot = append(lakehouse)
    losing(monkeypatch, chain(repeat(True, LOST), [False], repeat(True, LOST)))
    assert pin(lakehouse, "src.t", snapshot) == pin_tag(snapshot)
    assert remove_pin(lakehouse, "src.t", snapshot)
    assert lakehouse.load("src.t").refs().keys() == {"main"}


def test_pin_removed_repeatedly_is_reported(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag that is gone at the next look is made again. If it is removed every time, the error reports it."""
    snapshot = append(lakehouse)
    commit: Commit = GuardedSqlCatalog.commit_table
    taken_away = RemoveSnapshotRefUpdate.model_validate({"ref-name": pin_tag(snapshot)})
    times: float = LOST

    def commit_table(self: SqlCatalog, *request: Any) -> CommitTableResponse:
        nonlocal times
        response = commit(self, *request)
        if times > 0:
            times -= 1
            commit(self, lakehouse.load("src.t"), (), (taken_away,))
        return response

    monkeypatch.setattr(GuardedSqlCatalog, "commit_table", commit_table)
    assert pin(lakehouse, "src.t", snapshot) == pin_tag(snapshot)
    assert remove_pin(lakehouse, "src.t", snapshot)
    times = math.inf
    monkeypatch.setattr("dlac_pipeline.lakehouse.iceberg.snapshots.retrying", partial(retrying, 0.5))
    with pytest.raises(PinLost, match="does not stay: it was there, and was gone"):
        pin(lakehouse, "src.t", snapshot)


def test_expiry_that_races_with_a_pin(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expiry that began before the tag was there takes snapshot and tag: holding it then ends in an error, not in a pin."""
    snapshot = append(lakehouse)
    append(lakehouse)
    config = lakehouse.config
    plain = SqlCatalog(config.catalog_name, **config.catalog_properties())  # an engine without the guard
    expiry = plain.load_table("src.t").maintenance.expire_snapshots().by_id(snapshot)
    commit = GuardedSqlCatalog.commit_table

    def raced(self: SqlCatalog, table: Any, *rest: Any) -> Any:
        answer = commit(self, table, *rest)  # type: ignore[arg-type]  # the patched method's own signature
        monkeypatch.undo()
        expiry.commit()
        return answer

    monkeypatch.setattr(GuardedSqlCatalog, "commit_table", raced)
    with pytest.raises((NoSuchSnapshot, PinLost)):
        hold(lakehouse, "src.t", snapshot, "tag")


@pytest.mark.parametrize(("table", "column"), [("recoveries", "work_lost_s"), ("consumption", "claim.origin")])
def test_new_columns_beside_busy_writers(
    lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch, table: str, column: str
) -> None:
    """Columns that a table of an older version lacks are added at its first use, if other writers let it ever commit."""
    with lakehouse.own(table).update_schema() as update:
        update.delete_column(tuple(column.split(".")))
    losing(monkeypatch, repeat(True))
    monkeypatch.setattr("dlac_pipeline.lakehouse.iceberg.connect.retrying", partial(retrying, 0.5))
    with pytest.raises(CommitConflict):
        connect(lakehouse.config).own(table)
    monkeypatch.undo()
    losing(monkeypatch, repeat(True, 2))
    assert column in connect(lakehouse.config).own(table).schema().column_names


def test_columns_of_drafts_are_refused(lakehouse: Lakehouse) -> None:
    """A ledger of before version 1 has a column `detail`, and lacks others: no row of it is read, and nothing is added."""
    with lakehouse.own("consumption").update_schema() as update:
        update.delete_column("checkpoint")
        update.add_column("detail", StringType())
        update.move_before("detail", "claim")
    opened = connect(lakehouse.config)
    with pytest.raises(
        FormatTooNew, match=r"format version 1 in table 'consumption', found .*'leg_json', 'detail', 'claim'"
    ):
        opened.read_own("consumption")
    assert "checkpoint" not in opened.load("dlac.consumption").schema().column_names


def test_columns_of_later_versions_are_kept(lakehouse: Lakehouse) -> None:
    """A later DLAC of the same format may have added a column at the end: its table is read without it."""
    with lakehouse.own("recoveries").update_schema() as update:
        update.add_column("later", StringType())
    assert connect(lakehouse.config).read_own("recoveries", columns=("run",)).num_rows == 0


def test_missing_table_is_made_at_first_use(lakehouse: Lakehouse) -> None:
    """The process that made the tables of a lakehouse may have been killed before the last one."""
    lakehouse.catalog.drop_table("dlac.recoveries")
    assert connect(lakehouse.config, create=False).read_own("recoveries").num_rows == 0
