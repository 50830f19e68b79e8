"""Checkpoints by the clock: all ranks save them at the same step, and nothing else changes."""

from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from tests.conftest import Arena
from tests.faults.undisturbed import check_pass


@pytest.mark.soak
def test_checkpoints_follow_clock(campaign: Arena) -> None:
    """Two ranks save the same steps after a time has passed."""
    run = "timed"
    clock: dict[str, Any] = {"every_steps": None, "every_s": 1.0, "keep_last": 1}
    checkpoints = campaign.launched(campaign.spec(run, passes=1, pause_s=0.12, **clock)).of("checkpoint")
    assert len(checkpoints) >= 3
    assert {event["reason"] for event in checkpoints[:-1]} == {"seconds"}
    assert checkpoints[-1]["reason"] in ("seconds", "end")  # it may be due at the last step
    check_pass(campaign, run)
    assert audit_run(campaign.lakehouse, run).exact
