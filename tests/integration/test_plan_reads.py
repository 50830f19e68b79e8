"""Reads of a plan: one per process, from the choice of the leg to the first batch."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.lakehouse.errors import TableReplaced
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.plan.legs.choice import plan_sources
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from dlac_pipeline.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.fixture
def spec(arena: Arena) -> JobSpec:
    """A job over a small table."""
    arena.table(appends=(400,))
    return arena.spec("r", world_size=1, passes=1, every_steps=2)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often this process reads the row of a plan, and how often a plan's work units."""
    found: Counter[str] = Counter()
    read_own = Lakehouse.read_own

    def counted(self: Lakehouse, name: str, *args: Any, **rest: Any) -> Any:
        found[name] += rest.get("columns") != ("unit",)  # which only finds whether there are any
        return read_own(self, name, *args, **rest)

    monkeypatch.setattr(Lakehouse, "read_own", counted)
    return found


def _open_and_read(plans: Plans, point: ResumePoint, spec: JobSpec) -> None:
    with closing(open_leg(plans, Leg.from_json(point.leg), spec).reader()) as reader:
        next(iter(reader))


def test_resume_reads_plan_once(arena: Arena, spec: JobSpec, reads: Counter[str]) -> None:
    """A rank without a supervisor claims the run, and opens the leg with the plan that the claim has read."""
    arena.train(spec, until=8)
    reads.clear()
    plans = Plans(arena.lakehouse)
    point = start_attempt(plans, spec, ClaimRequest())
    assert point.step > 0
    _open_and_read(plans, point, spec)
    assert (reads["plans"], reads["work_units"]) == (1, 1)


def test_recovery_reads_plan_once(arena: Arena, spec: JobSpec, reads: Counter[str]) -> None:
    """A recovered attempt keeps the plan that the attempt before it had claimed."""
    first = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    reads.clear()
    plans = Plans(arena.lakehouse)
    point = start_attempt(plans, spec, ClaimRequest(replaces=first.attempt))
    _open_and_read(plans, point, spec)
    assert (reads["plans"], reads["work_units"]) == (1, 1)


def test_recovery_reads_sources_last(arena: Arena, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery loads its source table once the checkpoint is known to be whole. A launch loads it before the claim."""
    arena.train(spec, until=8)
    done, load = list[str](), Lakehouse.load

    def noted(self: Lakehouse, table: str, *args: Any, **rest: Any) -> Any:
        done.append(table)
        return load(self, table, *args, **rest)

    monkeypatch.setattr(Lakehouse, "load", noted)
    for request, first in ((ClaimRequest(replaces=1), "verified"), (ClaimRequest(), "src.t")):
        done.clear()
        start_attempt(Plans(arena.lakehouse), spec, request, verifying=lambda *facts: done.append("verified"))
        assert next(each for each in done if each in ("verified", "src.t")) == first
        assert {"verified", "src.t"} <= {*done}


def test_recovery_keeps_exclusions_of_rewind(arena: Arena, spec: JobSpec) -> None:
    """A recovery after a rewind leaves the excluded rows out, in a new leg, although its launch requests no change."""
    arena.train(spec, until=8)
    rewind_run(arena.lakehouse, "r", nonce="n", step=4, exclude=["even = true"], spec=spec)
    point = start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=2))
    assert (point.step, point.leg_is_new, point.leaves_out_more) == (4, True, True)
    assert json.loads(point.leg)["sources"][0]["exclude"] == ["even = true"]


def test_recovery_refuses_replaced_table(arena: Arena, spec: JobSpec) -> None:
    """A table that was dropped and created again is refused after the claim of a recovery, before any rank trains."""
    arena.train(spec, until=8)
    arena.lakehouse.catalog.drop_table("src.t")
    arena.table(appends=(400,))
    with pytest.raises(TableReplaced):
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=1))


def test_new_plan_is_not_read_again(arena: Arena, spec: JobSpec, reads: Counter[str]) -> None:
    """The process that plans the sources of a new run keeps the plan. Three lookups make sure that it is written once."""
    plans = Plans(arena.lakehouse)
    _open_and_read(plans, start_attempt(plans, spec, ClaimRequest()), spec)
    assert (reads["plans"], reads["work_units"]) == (3, 0)


def test_supervisor_reads_plan_once(arena: Arena, spec: JobSpec, reads: Counter[str]) -> None:
    """The supervisor reads the requested plan for the claim, and for its warnings. Its ranks are other processes."""
    (plan,) = plan_sources(arena.lakehouse, spec)
    reads.clear()
    assert Supervisor(Request(spec=spec, plan_ids=(plan.id,))).run().ending == "finished"
    assert (reads["plans"], reads["work_units"]) == (1, 1)
