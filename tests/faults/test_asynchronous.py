"""Checkpoints committed in the background, slower than training."""

from typing import Any

import pytest

from tests.conftest import Arena
from tests.faults.undisturbed import check_finished


@pytest.mark.soak
def test_stalled_commit_delays_next_checkpoint(campaign: Arena) -> None:
    """One checkpoint is in flight. Training waits at the next one instead of keeping several copies, and loses nothing."""
    run = "asynchronous-slow"
    changes: dict[str, Any] = {"env": {"COMMIT_SLEEPS_S": "0,2,0"}, "mode": "asynchronous"}
    launch = campaign.launch(campaign.spec(run, "train_sabotaged.py", passes=1, **changes))
    check_finished(campaign, run, launch)
    stalls = {event["step"]: event["phases"]["stall"] for event in launch.of("checkpoint")}
    assert stalls[30] > 1.0  # of the 2 s for which the commit before it slept
    assert len(launch.of("attempt")) == 1
