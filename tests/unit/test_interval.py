"""The interval between checkpoints: the optimum, its bounds, and the failures in a run's history."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlac_pipeline.checkpoint.interval import Interval, open_interval
from dlac_pipeline.checkpoint.interval_choice import (
    AutomaticInterval,
    Cost,
    Failures,
    choose_interval,
    daly_interval_s,
)
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.lakehouse.ledger.typed_rows import KINDS, LedgerRow
from dlac_pipeline.spec.job_spec import CheckpointSpec
from tests.small_records import small_recovery

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0


def settings(**changes: Any) -> CheckpointSpec:
    """Return settings of an automatic interval."""
    return CheckpointSpec(**{"every_steps": "auto", **changes})


def fixed(**changes: Any) -> Interval:
    """Return the clock of a job spec with a fixed interval, which reads no lakehouse."""
    spec, lakehouse = SimpleNamespace(checkpoint=CheckpointSpec(**changes)), None
    return open_interval(spec, lakehouse, 0.0)  # type: ignore[arg-type]  # as far as it reads them


def row(kind: str, attempt: int, at_s: float, **values: Any) -> LedgerRow:
    """Return a ledger row that was committed `at_s` seconds after the start."""
    return KINDS[kind](attempt=attempt, committed_at=START + timedelta(seconds=at_s), **values)


def recovery(replaced: int, failed_at_s: float) -> Recovery:
    """Return a recovery from an attempt whose last sign of life was at that time."""
    failed_at = START + timedelta(seconds=failed_at_s)
    return small_recovery(seq=replaced, attempt=replaced + 1, replaced_attempt=replaced, failed_at=failed_at)


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
    failures = Failures(count=int(failed_after_s > 0), trained_s=failed_after_s)
    choice = choose_interval(settings(**given), cost, failures)
    assert choice.interval_s == pytest.approx(interval_s, rel=0.005)
    assert why in choice.reason


def test_preempted_attempt_did_not_fail() -> None:
    """Failures are replaced attempts, unless they had caught up or were preempted. The current attempt is running."""
    rows = [
        row("claim", 1, 0),
        row("checkpoint", 1, 100, reason="steps"),
        row("claim", 2, 200),
        row("checkpoint", 2, 300, reason="SIGTERM"),
        row("claim", 3, 400),
        row("claim", 4, 500),
        row("checkpoint", 4, 500, reason="end"),
        row("claim", 5, 600),
    ]
    found = Failures.of_rows(rows, [recovery(1, 150.0), recovery(3, 450.0)])
    assert found == Failures(count=2, trained_s=150.0 + 100.0 + 50.0)
    assert found.mtbf_s(DAY_S) == 150.0
    assert Failures().mtbf_s(DAY_S) == DAY_S
    assert Failures(trained_s=3 * DAY_S).mtbf_s(DAY_S) == 3 * DAY_S


def test_cost_is_read_from_row() -> None:
    """A checkpoint costs its stall, and a synchronous one its whole duration."""
    assert Cost.of_rows([row("checkpoint", 1, 0)]) is None
    asynchronous = row(
        "checkpoint",
        1,
        1,
        bytes=1,
        phases={"stall": 0.5, "copy": 0.5, "write": 1.0, "seal": 1.0, "sync": 9.0, "vote": 0.5},
    )
    assert Cost.of_rows([asynchronous]) == Cost(lost_s=0.5, total_s=3.0)
    waited = row("checkpoint", 1, 2, bytes=1, phases={"write": 2.0, "vote": 0.5})
    assert Cost.of_rows([asynchronous, waited]) == Cost(lost_s=2.5, total_s=2.5)


def test_slower_steps_count_as_cost() -> None:
    """Ten steps of 1.5 s after a checkpoint, instead of 1 s, add 5 s to a stall of half a second."""
    interval = AutomaticInterval(settings(), 0.0, cost=None, failures=Failures())
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
    assert fixed().note() == {}


def test_similar_interval_is_not_reported() -> None:
    """A choice is reported if it is new, and if it differs from the last reported one by more than a tenth."""
    interval = AutomaticInterval(settings(), 0.0, cost=None, failures=Failures())
    assert interval.news() is not None
    assert interval.news() is None
    interval.committed(60.0, {"stall": 1.0, "total": 1.0})
    news = interval.news()
    assert news is not None
    interval.committed(120.0, {"stall": 1.1, "total": 1.1})
    assert interval.news() is None
    interval.committed(180.0, {"stall": 4.0, "total": 4.0})
    assert interval.news() is not None
