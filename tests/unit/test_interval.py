"""The interval between checkpoints and between states: the optimum, its bounds, and the failures in a run's history."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlac_pipeline.checkpoint.interval import AutomaticInterval, Interval, checkpoint_limits, open_interval
from dlac_pipeline.checkpoint.interval_choice import Cost, Failures, Limits, choose_interval, daly_interval_s
from dlac_pipeline.lakehouse.ledger.typed_rows import KINDS, LedgerRow
from dlac_pipeline.spec.job_spec import CheckpointSpec
from tests.memory_states import fresh_start

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0


def limits(**changes: Any) -> Limits:
    """Return the limits of an automatic interval between checkpoints."""
    return checkpoint_limits(CheckpointSpec(**{"every_steps": "auto", **changes}))


def fixed(**changes: Any) -> Interval:
    """Return the clock of a fixed interval."""
    return open_interval(CheckpointSpec(**changes), fresh_start(), 0.0)


def row(kind: str, attempt: int, at_s: float, **values: Any) -> LedgerRow:
    """Return a ledger row that was committed `at_s` seconds after the start."""
    return KINDS[kind](attempt=attempt, committed_at=START + timedelta(seconds=at_s), **values)


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return expected time over useful time, for exponential failures without restart time (Daly 2006, equation 20)."""
    return mtbf_s * (math.exp((interval_s + cost_s) / mtbf_s) - 1) / interval_s


@given(st.floats(0.01, 600.0), st.floats(3600.0, 30 * DAY_S))
def test_interval_is_near_optimum(cost_s: float, mtbf_s: float) -> None:
    """The formula's interval costs at most 0.2 % more than the best one, which a search of the exact expectation finds."""
    found = lost_share(daly_interval_s(cost_s, mtbf_s), cost_s, mtbf_s)
    grid = [math.sqrt(2 * cost_s * mtbf_s) * 1.05**exponent for exponent in range(-40, 41)]
    assert found <= min(lost_share(each, cost_s, mtbf_s) for each in grid) * 1.002
    assert daly_interval_s(2 * mtbf_s, mtbf_s) == mtbf_s


@pytest.mark.parametrize(
    ("changes", "cost", "interval_s", "why"),
    [
        ({}, None, 60.0, "first one shows"),
        ({"failed_after_s": 50.0}, None, 25.0, "first one shows"),
        ({"every_s": 30.0}, None, 30.0, "first one shows"),
        ({}, Cost(lost_s=1.0, total_s=1.0), 415.0, "optimum for checkpoints that cost 1 s, no failure yet"),
        ({"every_s": 103.0}, Cost(lost_s=1.0, total_s=1.0), 100.0, "wished recovery point of 103 s"),
        ({"every_s": 20.0}, Cost(lost_s=5.0, total_s=5.0), 45.0, "cannot be held"),
        ({"failed_after_s": 60.0}, Cost(lost_s=5.0, total_s=5.0), 45.0, "10% of the time at the most"),
        ({"failed_after_s": 60.0}, Cost(lost_s=0.1, total_s=30.0), 30.0, "as long as one takes"),
        ({"failed_after_s": 60.0}, Cost(lost_s=0.001, total_s=0.01), 2.0, "as often as ranks agree"),
    ],
)
def test_interval_names_its_bound(changes: dict[str, Any], cost: Cost | None, interval_s: float, why: str) -> None:
    """The interval is the optimum, unless the recovery point, the overhead or the duration of a checkpoint bounds it."""
    failed_after_s = changes.get("failed_after_s", 0.0)
    given = {name: each for name, each in changes.items() if name != "failed_after_s"}
    choice = choose_interval(cost, Failures(count=int(failed_after_s > 0), trained_s=failed_after_s), limits(**given))
    assert choice.interval_s == pytest.approx(interval_s, rel=0.005)
    assert why in choice.reason


@given(
    st.one_of(st.just(0.0), st.floats(1e-6, 100.0)),
    st.floats(10.0, 30 * DAY_S),
    st.floats(1.0, 10.0),
    st.one_of(st.none(), st.floats(0.1, 600.0)),
    st.floats(1e-4, 100.0),
)
def test_states_keep_their_limits(
    cost_s: float, mtbf_s: float, longer: float, point_s: float | None, step_s: float
) -> None:
    """A failure costs no more than the recovery point, unless states would take over 0.5 % of the time, or 2 % if it is set."""
    states = Limits.of_states(CheckpointSpec(memory_point_s=point_s))
    cost = Cost(lost_s=cost_s, total_s=cost_s)
    choice, rarer = (
        choose_interval(cost, Failures(count=1, trained_s=each), states) for each in (mtbf_s, longer * mtbf_s)
    )
    assert choice.interval_s <= rarer.interval_s
    steps = choice.steps(step_s)
    assert 1 <= steps <= max(1, rarer.steps(step_s))
    assert cost_s <= (0.02 + 1e-9) * (steps * step_s + cost_s)
    share = 0.005 if point_s is None else 0.02
    may_be_s = max((10.0 if point_s is None else point_s) - cost_s, cost_s * (1 / share - 1))
    assert choice.interval_s <= may_be_s
    assert (steps - 1) * step_s <= may_be_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cost_s", "step_s", "failures", "point_s", "steps"),
    [
        (0.002, 0.001, Failures(), None, 9_998),
        (0.107, 0.85, Failures(), None, 26),
        (0.107, 0.85, Failures(), 10.0, 11),
        (0.107, 0.85, Failures(count=1, trained_s=1_000.0), None, 18),
        (0.1, 60.0, Failures(), None, 1),
    ],
)
def test_states_are_steps_apart(
    cost_s: float, step_s: float, failures: Failures, point_s: float | None, steps: int
) -> None:
    """Steps of 1 ms and of a minute, before and after a failure, with the default and a point that is set."""
    states = Limits.of_states(CheckpointSpec(memory_point_s=point_s))
    assert choose_interval(Cost(lost_s=cost_s, total_s=cost_s), failures, states).steps(step_s) == steps


def test_preempted_attempt_did_not_fail() -> None:
    """Failures are replaced attempts that had not caught up and were not preempted, up to their last checkpoint or state."""
    rows = [
        row("claim", 1, 0),
        row("checkpoint", 1, 100, reason="steps"),
        row("claim", 2, 1_000),
        row("checkpoint", 2, 1_100, reason="SIGTERM"),
        row("claim", 3, 1_200),
        row("claim", 4, 1_500, memory_of=3, memory_at=(START + timedelta(seconds=1_470)).timestamp()),
        row("checkpoint", 4, 1_500, reason="end"),
        row("claim", 5, 1_600),  # found no new rows
        row("claim", 6, 1_700),
    ]
    found = Failures.of_rows(rows)
    assert found == Failures(count=2, trained_s=160.0 + 100.0 + 300.0)
    assert found.mtbf_s() == 280.0
    assert [Failures().after(days * DAY_S).mtbf_s() for days in (0, 3)] == [DAY_S, 3 * DAY_S]


def test_cost_is_read_from_row() -> None:
    """A checkpoint costs its stall, and a synchronous one its whole duration."""
    assert Cost.of_rows([row("checkpoint", 1, 0)]) is None
    phases = {"stall": 0.5, "copy": 0.5, "write": 1.0, "seal": 1.0, "sync": 9.0, "vote": 0.5}
    asynchronous = row("checkpoint", 1, 1, bytes=1, phases=phases)
    assert Cost.of_rows([asynchronous]) == Cost(lost_s=0.5, total_s=3.0)
    waited = row("checkpoint", 1, 2, bytes=1, phases={"write": 2.0, "vote": 0.5})
    assert Cost.of_rows([asynchronous, waited]) == Cost(lost_s=2.5, total_s=2.5)


def test_slower_steps_count_as_cost() -> None:
    """Ten steps of 1.5 s after a checkpoint, instead of 1 s, add 5 s to a stall of half a second."""
    interval = AutomaticInterval(limits(), 0.0, cost=None, failures=Failures())
    now = 0.0
    for _ in range(10):
        now += 1.0
        interval.step_done(now, in_background=False)
    interval.taken(now)
    for _ in range(10):
        now += 1.5
        interval.step_done(now, in_background=True)
    interval.committed(now, {"stall": 0.5, "total": 15.0})
    assert interval.choice.interval_s == pytest.approx(daly_interval_s(5.5, DAY_S), rel=0.001)
    assert interval.needed_s(now, in_background=False) == 15.0
    assert interval.needed_s(now, in_background=True) == 15.0
    interval.taken(now)
    assert interval.needed_s(now + 5.0, in_background=True) == 25.0


def test_interval_is_due_once_per_period() -> None:
    """Every checkpoint restarts the clock, whatever its reason."""
    interval = fixed(every_s=30.0)
    assert [interval.is_due(now) for now in (0.0, 29.9, 30.0, 31.0)] == [False, False, True, True]
    interval.taken(31.0)
    assert [interval.is_due(now) for now in (31.0, 60.9, 61.0)] == [False, False, True]
    assert interval.news() is None
    assert interval.note() == {"interval_s": 30.0, "why": "as set in the job spec"}
    assert fixed(every_steps=5).note() == {}


def test_resume_point_has_cost_and_failures() -> None:
    """Without settings the interval is the optimum for the cost and the failures of the attempts before."""
    point = replace(fresh_start(), failures=10, trained_s=DAY_S, checkpoint_cost=[1.0, 2.0])
    assert open_interval(CheckpointSpec(), point, 0.0).choice.interval_s == daly_interval_s(1.0, DAY_S / 10)
    assert fixed().choice.interval_s == 60.0


def test_similar_interval_is_not_reported() -> None:
    """A choice is reported if it is new, and if it differs from the last reported one by more than a tenth."""
    interval = AutomaticInterval(limits(), 0.0, cost=None, failures=Failures())
    reported = [interval.news() is not None for _ in range(2)]
    for cost_s in (1.0, 1.1, 4.0):
        interval.committed(60.0, {"stall": cost_s, "total": cost_s})
        reported.append(interval.news() is not None)
    assert reported == [True, False, True, False, True]
