"""The sums of benchmarks/paper: how trainings under faults are compared, and the simulated month."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.intervals import Measured, cost_of, measured_of
from benchmarks.intervals import figures_of as interval_figures
from benchmarks.paper_parts.divergence import BATCH, Outcome, fault_steps
from benchmarks.paper_parts.month import DAYS, INTERRUPTIONS, Mode, modes_of, simulate
from benchmarks.paper_parts.summary import band_of, seconds_to, steps_worth, summarize

CALM = {10: 4.0, 20: 3.0, 30: 2.0}


def outcome(method: str, *, seed: int = 0, faulted: bool, validation: dict[int, float] = CALM) -> Outcome:
    """Return a training of 30 steps whose training losses equal its validation losses."""
    return Outcome(
        setting="stream", method=method, seed=seed, faulted=faulted, failed="", trained=30, computed=30, losses=dict(validation),
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


def test_time_to_equal_loss() -> None:
    """It is the first time of that loss, at the training's mean time of a step. A training that never has it has none."""
    slow = replace(outcome("dlac", faulted=True), seconds=60.0)
    assert seconds_to(2.0, slow) == 60
    assert seconds_to(2.5, slow) == 50
    assert seconds_to(1.9, slow) is None
    assert seconds_to(2.0, replace(slow, validation={10: 4.0, 20: 2.0, 30: 2.2})) == 40


def test_method_is_compared_with_own_calm_training() -> None:
    """A method that shares its undisturbed training has the values of that training. A failed one is named, and not averaged."""
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
    assert ours.loss_distance == 0
    assert restart.loss_distance == pytest.approx((0.5 / 4 + 0.5 / 3 + 0.5 / 2) / 3)
    assert (ours.reached, restart.reached) == (1, 0)
    assert (restart.worth, restart.computed, restart.repeated, restart.missing) == (25, 1.5, 8, 6)


def test_month_loses_what_modes_cost() -> None:
    """Without restarts and losses only the overhead is lost. A restart costs its seconds times the interruptions."""
    free = Mode(name="", about="", restart_s=0.0, at_risk_s=0.0, overhead=0.02)
    assert simulate(free, start_s=0).mean == pytest.approx(0.98)
    slow = simulate(replace(free, overhead=0.0), start_s=600)
    assert slow.mean == pytest.approx(1 - INTERRUPTIONS * 600 / (DAYS * 86_400), rel=0.01)
    assert slow.low < slow.mean < slow.high


def test_month_has_measured_modes() -> None:
    """Checkpoints every 30 s have the fitted cost and the measured work at risk, and are left out without them."""
    recovery = {"bare_recovery_s": 5.0, "forked_recovery_s": 1.0}
    intervals = {"30s_overhead": 1.5, "30s_at_risk_s": 37.0, "commit_most_s": 7.0, "checkpoint_cost_s": 0.6}
    parts = {"recovery": recovery, "intervals": intervals}
    found = {part: {"figures": {name: {"value": value} for name, value in of.items()}} for part, of in parts.items()}
    *bare, ours = modes_of(found)
    assert (ours.restart_s, ours.at_risk_s, ours.overhead) == (1, 37, 0.02)
    assert modes_of({"recovery": found["recovery"]}) == bare


def at_interval(interval_s: float, *, overhead: float, commit_s: float) -> Measured:
    """Return the measurement of one checkpoint interval."""
    return Measured(
        interval_s=interval_s, overhead=overhead, between_commits_s=interval_s, at_risk_s=interval_s + commit_s,
        commit_s=commit_s, noise=(1.0, 1.0),
    )  # fmt: skip


def test_cost_fits_steady_intervals() -> None:
    """One interval is too short for a commit, and does not count unless no other exists. No cost is negative."""
    short = at_interval(5, overhead=0.1, commit_s=8)
    steady = [at_interval(10, overhead=0.06, commit_s=8), at_interval(30, overhead=0.02, commit_s=8)]
    assert cost_of([short, *steady]) == pytest.approx(0.6)
    assert cost_of([short]) == pytest.approx(0.5)
    assert cost_of([at_interval(10, overhead=-0.01, commit_s=1)]) == pytest.approx(-0.1)


def test_longer_intervals_are_modelled() -> None:
    """Overhead is the cost over the interval. At risk is the interval and the longest commit. Noise hides an overhead only."""
    figures = interval_figures([at_interval(10, overhead=0.06, commit_s=8), at_interval(30, overhead=0.02, commit_s=7)])
    assert figures["modelled_60s_overhead"].value == pytest.approx(1)
    assert figures["modelled_300s_at_risk_s"].value == 308
    assert figures["modelled_at_risk_at_2_percent_s"].value == pytest.approx(38)
    assert (figures["10s_overhead"].bar, figures["30s_at_risk_s"].bar) == ("<= 2", "<= 30")
    noisy = interval_figures([replace(at_interval(30, overhead=0.02, commit_s=7), noise=(0.96, 1.09))])
    assert (noisy["30s_overhead"].bar, noisy["30s_at_risk_s"].bar) == (None, "<= 30")


def test_blocks_become_overhead() -> None:
    """A block with checkpoints is compared with those around it. A state is at risk until the next commit."""
    raw: dict[str, Any] = {
        "blocks": [
            {"seconds": 10.0, "first": 0, "last": 10},
            {"seconds": 12.0, "first": 10, "last": 20},
            {"seconds": 10.0, "first": 20, "last": 30},
        ],
        "stamps_s": [float(step) for step in range(1, 31)],
        "checkpoints": [
            {"step": step, "phases": {"total": total}} for step, total in ((3, 9.0), (10, 2.0), (15, 3.0), (30, 9.0))
        ],
    }
    found = measured_of(5.0, raw)
    assert found.overhead == pytest.approx(0.2)
    assert (found.commit_s, found.between_commits_s, found.at_risk_s) == (3, 6, 8)
    assert found.noise == (1, 1)
    with pytest.raises(RuntimeError, match="two checkpoints in a block"):
        measured_of(5.0, {**raw, "checkpoints": raw["checkpoints"][:2]})
