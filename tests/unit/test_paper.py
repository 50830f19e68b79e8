"""The sums of benchmarks/paper: how trainings under faults are compared, and the simulated month."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.paper_parts.divergence import BATCH, Outcome, fault_steps
from benchmarks.paper_parts.month import DAYS, INTERRUPTIONS, Mode, simulate
from benchmarks.paper_parts.summary import band_of, steps_worth, summarize

CALM = {10: 4.0, 20: 3.0, 30: 2.0}


def outcome(method: str, *, seed: int = 0, faulted: bool, validation: dict[int, float] = CALM) -> Outcome:
    """Return a training of 30 steps whose training losses are those of validation."""
    return Outcome(
        setting="stream", method=method, seed=seed, faulted=faulted, trained=30, computed=30, losses=dict(validation),
        validation=validation,
    )  # fmt: skip


def test_faults_are_the_same_for_all() -> None:
    """They are in order, apart, and in steps that any training has."""
    steps = fault_steps(240, 20)
    assert steps == fault_steps(240, 20)
    assert list(steps) == sorted(set(steps))
    assert len(steps) == 20
    assert 10 <= steps[0] <= steps[-1] < 240


def test_band_is_student_interval() -> None:
    """Five values: the factor is 2.776. A single one has no band."""
    assert band_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert band_of([7.0]) == 0.0


def test_loss_is_worth_undisturbed_steps() -> None:
    """Between two evaluations it is interpolated. A curve that rises again counts by its best loss so far."""
    assert steps_worth(2.5, outcome("dlac", faulted=False)) == 25
    assert steps_worth(1.0, outcome("dlac", faulted=False)) == 30
    assert steps_worth(2.5, outcome("dlac", faulted=False, validation={10: 4.0, 20: 2.0, 30: 2.2})) == 17.5
    assert steps_worth(9.0, outcome("dlac", faulted=False, validation={10: 4.0, 20: 2.0, 30: 9.0})) == 30


def test_method_is_compared_with_own_calm_training() -> None:
    """A method that shares its undisturbed training has that of the other. A failed one is named, and not averaged."""
    worse = {step: loss + 0.5 for step, loss in CALM.items()}
    outcomes = [
        outcome("dlac", faulted=False),
        outcome("dlac", faulted=True),
        outcome("stateful", faulted=False),
        replace(outcome("restart", faulted=True, validation=worse), repeated=8, missing=6, computed=45),
        replace(outcome("restart", seed=1, faulted=True), failed="out of rows", validation={}),
    ]
    ours, hf, restart = summarize([*outcomes, replace(outcome("hf", faulted=True), failed="no such rank")], BATCH)
    assert (hf.method, hf.seeds, hf.failed) == ("hf", 0, ("no such rank",))
    assert (ours.method, ours.identical, ours.excess, ours.area) == ("dlac", 1, 0.0, 0.0)
    assert (restart.method, restart.identical, restart.seeds, restart.failed) == ("restart", 0, 1, ("out of rows",))
    assert (restart.excess, restart.area) == (0.5, 0.5)
    assert (restart.worth, restart.computed, restart.repeated, restart.missing) == (25, 1.5, 8, 6)


def test_month_loses_what_modes_cost() -> None:
    """Without restarts and losses only the overhead is lost. A restart costs its seconds times the interruptions."""
    free = Mode(name="", about="", restart_s=0.0, at_risk_s=0.0, overhead=0.02)
    assert simulate(free, start_s=0).mean == pytest.approx(0.98)
    slow = simulate(replace(free, overhead=0.0), start_s=600)
    assert slow.mean == pytest.approx(1 - INTERRUPTIONS * 600 / (DAYS * 86_400), rel=0.01)
    assert slow.low < slow.mean < slow.high
