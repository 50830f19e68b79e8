"""Checkpoints by the clock: all ranks save them at the same step, and nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.typed_rows import RetireRow
from tests.faults.undisturbed import check_pass

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.mark.soak
def test_checkpoints_follow_clock(campaign: Arena) -> None:
    """Two ranks save the same steps after a time has passed. One of every N steps is kept."""
    run = "timed"
    clock: dict[str, Any] = {"every_steps": None, "every_s": 1.0, "keep_last": 1, "keep_every_steps": 20}
    launch = campaign.launch(campaign.spec(run, passes=1, pause_s=0.12, **clock))
    assert launch.wait() == 0, launch.stderr
    checkpoints = launch.of("checkpoint")
    assert len(checkpoints) >= 3
    assert {event["reason"] for event in checkpoints[:-1]} == {"seconds"}
    assert checkpoints[-1]["reason"] in ("seconds", "end")  # it may be due at the last step
    steps = [event["step"] for event in checkpoints]
    retired = {row.checkpoint_id for row in campaign.rows(run, RetireRow)}
    kept = [event["step"] for event in checkpoints if event["checkpoint_id"] not in retired]
    milestones = {next(step for step in steps if step >= multiple) for multiple in (20, 40, 60)}
    assert kept == sorted(milestones | {63})
    check_pass(campaign, run)
    assert audit_run(campaign.lakehouse, run).exact
