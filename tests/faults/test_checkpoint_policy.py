"""Checkpoints by the clock: all ranks save them at the same step, and nothing else changes."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.lakehouse.ledger.typed_rows import RetireRow
from tests.faults.undisturbed import check_pass

if TYPE_CHECKING:
    from tests.conftest import Arena

CLOCK: dict[str, Any] = {"passes": 1, "every_steps": None, "pause_s": 0.12}


def check_exact(campaign: Arena, run: str) -> None:
    """Check that rows and losses equal the undisturbed run's, by the journal and by the audit."""
    check_pass(campaign, run)
    assert audit_run(campaign.lakehouse, run).exact


@pytest.mark.soak
def test_checkpoints_follow_clock(campaign: Arena) -> None:
    """Two ranks save the same steps after a time has passed. One of every N steps is kept."""
    run = "timed"
    launch = campaign.launch(campaign.spec(run, every_s=1.0, keep_last=1, keep_every_steps=20, **CLOCK))
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
    check_exact(campaign, run)


@pytest.mark.soak
def test_optimum_considers_failures(campaign: Arena) -> None:
    """The interval and its reason are in events, ledger, SQL and status. A killed rank counts as a failure."""
    run = "automatic"
    launch = campaign.launch(campaign.spec(run, **{**CLOCK, "every_steps": "auto", "every_s": 5.0}))
    launch.wait_for("checkpoint")
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    assert launch.wait() == 0, launch.stderr
    first, second, *_ = launch.of("interval")
    assert (first["interval_s"], first["why"]) == (5.0, "the first one shows what they cost")
    assert second["interval_s"] < 5.0
    after_the_kill = [event["why"] for event in launch.of("interval") if event["attempt"] == 2]
    assert "1 failure in" in after_the_kill[0]
    details = campaign.lineage(run)
    assert {each.reason for each in details[:-1]} == {"auto"}
    status = run_status(campaign.lakehouse, run)
    assert status["checkpoint_reason"] == details[-1].reason in ("auto", "end")
    assert (status["checkpoint_interval_s"], status["checkpoint_interval_why"]) == (
        round(details[-1].interval_s or 0.0, 1),
        details[-1].why,
    )
    with open_audit(campaign.lakehouse) as audit:
        query = f"SELECT reason, interval_s, why FROM checkpoint_costs WHERE run = '{run}' ORDER BY step"
        assert audit.execute(query).fetchall() == [(each.reason, each.interval_s, each.why) for each in details]
    check_exact(campaign, run)
