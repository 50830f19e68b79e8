"""Scenarios that a review found, in which an earlier version repeated rows, hung, or lost the reason."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy.exc import OperationalError

from catalog.commits import Attempt, claim, commit_checkpoint
from catalog.errors import DataFileUnreadable, LakehouseError, NoRestorableCheckpoint, ResumeMismatch, SteppedAside
from catalog.plans import append_own, read_units
from dlac_pipeline.plan.legs import first_leg
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.recover.coordinator import new_nonce, take_over
from dlac_pipeline.recover.supervise import Supervisor
from tests.conftest import Arena, source_rows


def test_units_whose_answer_was_lost_are_written_once(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append of work units lands, the connection breaks: the repeat finds them and writes nothing."""
    arena.table(appends=(200,))
    real = SqlCatalog.commit_table
    broken: list[bool] = []

    def commit_table(self: SqlCatalog, table: Any, *request: Any) -> Any:
        response = real(self, table, *request)
        if table.name()[-1] == "work_units" and not broken:
            broken.append(True)
            raise OperationalError("UPDATE", {}, Exception("the answer is lost"))
        return response

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
    plan = make_plan(arena.lakehouse, arena.spec("r").source)
    assert broken
    assert len(plan.units) == plan.row.units == 4


def test_a_plan_with_more_units_than_were_planned_is_refused(arena: Arena) -> None:
    """Somebody's hand in `work_units` is an error, not twice the rows."""
    arena.table(appends=(200,))
    plan = make_plan(arena.lakehouse, arena.spec("r").source)
    units = read_units(arena.lakehouse, plan.row)
    append_own(arena.lakehouse, "work_units", units.slice(0, 1), unless=lambda: False)
    with pytest.raises(LakehouseError, match=r"expected 4 work units .* found 5"):
        read_units(arena.lakehouse, plan.row)


def test_a_checkpoint_committed_between_look_and_claim_keeps_its_leg(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint of the replaced attempt lands just before the claim: another seed is refused, not mixed in."""
    arena.table()
    spec = arena.spec("raced", world_size=1, every_steps=5)
    arena.train(spec, until=3)
    other = arena.spec("raced", world_size=1, every_steps=5, seed=99)
    real = claim

    def late_claim(ledger: Any, run: str, **options: Any) -> Any:
        monkeypatch.undo()
        fence = ledger.state(run).fence
        leg = first_leg(spec, [make_plan(arena.lakehouse, spec.source)])
        rows = [
            {"kind": "checkpoint", "checkpoint_id": "c5", "step": 5},
            {"kind": "leg", "checkpoint_id": "c5", "leg": 0, "detail": leg.to_json()},
        ]
        attempt = Attempt(run=run, number=fence.attempt, nonce=fence.nonce)
        commit_checkpoint(ledger, attempt, checkpoint_id="c5", parent=None, rows=rows)
        return real(ledger, run, **options)

    monkeypatch.setattr("dlac_pipeline.recover.coordinator.claim", late_claim)
    with pytest.raises(ResumeMismatch, match="seed: committed 3, asked for 99"):
        take_over(arena.lakehouse, other, nonce=new_nonce())


def test_a_recovery_before_the_first_checkpoint_keeps_the_plan_of_the_attempt_it_replaces(arena: Arena) -> None:
    """The source grew since: the run goes on with the snapshot that its first attempt was claimed for."""
    arena.table(appends=(100, 100))
    spec = arena.spec("early", world_size=1)
    first = take_over(arena.lakehouse, spec, nonce=new_nonce())
    arena.lakehouse.load("src.t").append(source_rows(200, 100))
    second = take_over(arena.lakehouse, spec, nonce=new_nonce(), replaces=first.attempt)
    assert second.leg == first.leg
    afresh = take_over(arena.lakehouse, spec, nonce=new_nonce())
    assert json.loads(afresh.leg)["sources"] != json.loads(first.leg)["sources"]


def test_a_file_with_other_rows_than_planned_is_named(arena: Arena) -> None:
    """A data file that was overwritten in place with fewer rows does not repeat its last row in silence."""
    arena.table(appends=(200,), row_group_rows=50)
    spec = arena.spec("short", world_size=1, every_steps=1)
    arena.train(spec, until=3)
    plan = make_plan(arena.lakehouse, spec.source)
    path = plan.units.file_paths[0].removeprefix("file://")
    pq.write_table(pq.read_table(path), path, row_group_size=40)
    with pytest.raises(DataFileUnreadable, match="expected 50 rows in row group"):
        arena.train(spec)


def test_a_second_takeover_of_the_same_attempt_steps_aside_before_it_touches_the_lock(arena: Arena) -> None:
    """`replaces` names an attempt that is not current any more: refused before waiting, claiming or replacing a lock."""
    arena.table(appends=(200,))
    spec = arena.spec("twice", world_size=1)
    take_over(arena.lakehouse, spec, nonce=new_nonce())
    take_over(arena.lakehouse, spec, nonce=new_nonce(), replaces=1)
    with pytest.raises(SteppedAside):
        Supervisor(spec, takeover=True, replaces=1).run()
    assert not list((arena.home / "checkpoints" / "twice").glob("launch*"))


def test_a_run_without_a_restorable_checkpoint_does_not_start_over(arena: Arena) -> None:
    """Once all its checkpoints are quarantined, every further launch ends with the same clear status."""
    arena.table(appends=(200,))
    spec = arena.spec("gone", world_size=1, every_steps=2)
    arena.train(spec, until=4)
    for manifest in (arena.home / "checkpoints" / "gone").glob("attempt-*/step-*/manifest.json"):
        manifest.write_text("{}")
    for _ in range(2):
        with pytest.raises(NoRestorableCheckpoint):
            take_over(arena.lakehouse, spec, nonce=new_nonce())
