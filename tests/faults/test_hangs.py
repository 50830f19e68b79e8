"""Ranks that live without progress, or with little: their heartbeats show them, and the reports name the phase."""

import time
from itertools import count
from typing import Any

import pytest

from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor
from tests.conftest import Arena

HANG_S = 15.0
"""Starting a rank may take longer on a busy node, and is no hang. A step or a commit may not."""


def test_deadlocked_collective_is_recovered(campaign: Arena) -> None:
    """Rank 0 waits for a message, rank 1 for its gradients. Both are ended, the hung one is named, and training resumes."""
    settings: dict[str, Any] = {"deadlock_at": 13, "hang_timeout_s": HANG_S, "steps": 20}
    launch = campaign.launched(campaign.spec("deadlocked", **settings))
    (failure,) = launch.of("failure")
    assert (failure["phase"], failure["step"]) == ("computing", 12)
    assert "no heartbeat for" in failure["cause"]
    assert "last while computing" in failure["cause"]
    (recovered,) = launch.of("recovered")
    assert (recovered["resumed_step"], recovered["rows_replayed"]) == (10, 64)
    assert recovered["detect_s"] >= HANG_S
    assert campaign.losses("deadlocked") == campaign.losses("reference")[:20]


@pytest.mark.soak
def test_changing_clock_ends_nothing(campaign: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes at each poll of the supervisor. Training ranks do not hang, and exiting ranks get their time."""
    wall, polls = time.time, count()
    monkeypatch.setattr(time, "time", lambda: wall() + 60.0 * next(polls))
    events: list[dict[str, Any]] = []

    def record(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step" and event["step"] >= 3:
            supervisor.stop()

    supervisor = Supervisor(Request(spec=campaign.spec("set", hang_timeout_s=HANG_S, pause_s=0.2)), on_event=record)
    outcome = supervisor.run()
    assert (outcome.ending, outcome.attempts) == ("stopped", 1)
    assert [event for event in events if event["event"] == "failure"] == []
    (last,) = campaign.lineage("set")
    assert last.step == outcome.step >= 3
