"""Rows that kill the rank that has them in hand are left out after a set number of deaths, and reported."""

from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.typed_rows import QuarantinedRowsRow
from tests.conftest import Arena

DEADLY = 123


def test_deadly_rows_are_quarantined(arena: Arena) -> None:
    """SIGSEGV at every batch with one row: that global batch is left out and named. All other rows are read once."""
    arena.table(appends=(300,))
    settings: dict[str, Any] = {"deaths_at_same_rows": 2, "attempts_without_progress": 2, "deadly_row": DEADLY}
    launch = arena.launched(arena.spec("r", passes=1, every_steps=4, **settings))
    assert len(launch.of("attempt")) == 3  # the commits of the first one do not matter
    assert all("SIGSEGV" in failure["cause"] for failure in launch.of("failure"))
    (event,) = launch.of("quarantine")
    read = [row for rows in arena.journal("r").values() for row in rows]
    assert len(read) == len(set(read)) == 300 - event["rows"]
    assert DEADLY not in read
    assert 1 <= event["rows"] <= 32
    named = arena.rows("r", QuarantinedRowsRow)
    assert sum(len(each.positions) for each in named) == sum(each.rows for each in named) == event["rows"]
    assert all("died in step" in each.reason for each in named)
    report = audit_run(arena.lakehouse, "r")
    assert report.exact, report.problems
    assert (report.rows_consumed, report.rows_quarantined, report.rows_excluded) == (
        300 - event["rows"],
        event["rows"],
        0,
    )


@pytest.mark.soak
@pytest.mark.parametrize(("rows", "follow"), [(300, "pinned"), (20, "pinned"), (320, "appends")])
def test_last_deadly_rows_are_quarantined_visibly(arena: Arena, rows: int, follow: str) -> None:
    """The rows are in the run's last or only batch: a leg without them is committed, which the next launch knows."""
    arena.table(appends=(rows,))
    batches = arena.train(arena.spec("before", world_size=1, passes=1))
    last = batches[max(batches)]
    settings: dict[str, Any] = {"deaths_at_same_rows": 2, "attempts_without_progress": 2, "deadly_row": last[0]}
    settings |= {"passes": 1, "every_steps": max(1, max(batches) - 1), "follow": follow}
    spec = arena.spec("r", world_size=1, **settings)
    arena.launched(spec)
    assert sum(each.rows for each in arena.rows("r", QuarantinedRowsRow)) == len(last)
    assert [row.step for row in arena.lineage("r")][-1] == max(batches) - 1
    if follow == "appends":
        assert not arena.launched(spec).of("failure")
    report = audit_run(arena.lakehouse, "r")
    assert (report.exact, report.problems, report.finished) == (True, (), follow == "pinned")
    assert (report.rows_consumed, report.rows_quarantined, report.rows_pending) == (rows - len(last), len(last), 0)
