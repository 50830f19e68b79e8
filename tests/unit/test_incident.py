"""What counts as a failure that a launch recovers from, and what is only a run that goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlac_pipeline.lakehouse.ledger.run_rows import Row
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.failure import failure_of_attempt

MOMENTS = {"noticed_at": 9.0, "launched_at": 9.0, "stopped_at": 9.0}


def rows(*reasons: str | None, **claim: Any) -> list[Row]:
    """The claim of attempt 1 and its checkpoints; None: one that says no reason."""
    details = [{} if reason is None else {"reason": reason} for reason in reasons]
    taken = [{"kind": "checkpoint", "attempt": 1, "detail": json.dumps(detail)} for detail in details]
    return [{"kind": "claim", "attempt": 1, "detail": json.dumps(claim)}, *taken]


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGUSR1", "termination_url", "end"])
def test_stopped_run_has_not_failed(reason: str) -> None:
    """Started again by a person it goes on, and there is no incident; by a sensor it was preempted, and there is one."""
    stopped = rows("steps", reason)
    assert failure_of_attempt(stopped, 1, noticed_by=OPERATOR, **MOMENTS) is None
    preempted = failure_of_attempt(stopped, 1, noticed_by="preemption_sensor", **MOMENTS)
    assert preempted is not None
    assert preempted.cause == "attempt 1 ended without finishing"


@pytest.mark.parametrize("reasons", [(), ("steps",), ("seconds",), ("SIGTERM", "auto"), (None,)])
def test_interrupted_run_has_failed(reasons: tuple[str | None, ...]) -> None:
    """Its last checkpoint, if there is one, was taken to train on behind it."""
    assert failure_of_attempt(rows(*reasons), 1, noticed_by=OPERATOR, **MOMENTS) is not None


def test_an_attempt_that_only_rewound_has_not_failed() -> None:
    """It never trained."""
    assert failure_of_attempt(rows(rewinds="r-1"), 1, noticed_by="recovery_sensor", **MOMENTS) is None
