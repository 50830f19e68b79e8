"""Checkpoints committed in the background have the state of the copied step, whatever process is killed at any time."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from tests.faults.undisturbed import STEPS, check_finished, check_pass

if TYPE_CHECKING:
    from tests.conftest import Arena

MODE = {"mode": "asynchronous"}


@pytest.mark.soak
def test_background_checkpoints_equal_synchronous_ones(campaign: Arena) -> None:
    """Checkpoints, rows and losses equal synchronous mode's. Events and ledger have the duration of each phase."""
    run = "asynchronous"
    launch = campaign.launch(campaign.spec(run, passes=1, **MODE))
    check_finished(campaign, run, launch)
    checkpoints = launch.of("checkpoint")
    assert [event["step"] for event in checkpoints] == STEPS
    assert [event["loss"] for event in checkpoints][:6] == [
        campaign.losses("reference")[step - 1] for step in STEPS[:6]
    ]
    phases = checkpoints[0]["phases"]
    assert phases["stall"] < phases["total"]
    assert {"copy", "write", "digest", "vote", "commit"} <= phases.keys()
    with open_audit(campaign.lakehouse) as audit:
        costs = audit.execute(
            f"SELECT step, bytes, stall_s < write_s + digest_s + 1000 FROM checkpoint_costs WHERE run = '{run}'"
        )
        assert sorted(costs.fetchall()) == [
            (event["step"], event["bytes"], True if event["step"] < 63 else None)
            for event in checkpoints  # the run waits for the last one
        ]


@pytest.mark.soak
def test_stalled_commit_delays_next_checkpoint(campaign: Arena) -> None:
    """One checkpoint is in flight. Training waits at the next one instead of keeping several copies, and loses nothing."""
    run = "asynchronous-slow"
    spec = campaign.spec(run, "train_sabotaged.py", env={"SABOTAGE": "sleep-before-commit@20"}, passes=1, **MODE)
    launch = campaign.launch(spec)
    check_finished(campaign, run, launch)
    stalls = {event["step"]: event["phases"]["stall"] for event in launch.of("checkpoint")}
    assert stalls[30] > 1.0  # of the 2 s for which the commit before it slept
    assert len(launch.of("attempt")) == 1


@pytest.mark.soak
def test_stop_leaves_checkpoint_of_last_step(campaign: Arena) -> None:
    """After SIGTERM the checkpoint in flight is committed, and then one of the step at which the run stops."""
    run = "asynchronous-stopped"
    launch = campaign.launch(campaign.spec(run, passes=1, pause_s=0.05, **MODE))
    launch.wait_for("checkpoint")
    os.kill(launch.process.pid, signal.SIGTERM)
    launch.wait()
    last = campaign.lineage(run)[-1]
    assert last.step == max(entry["step"] for entry in campaign.entries(run))
    again = campaign.launch(campaign.spec(run, passes=1, **MODE))
    assert again.wait() == 0, again.stderr
    check_pass(campaign, run)


@pytest.mark.soak
@pytest.mark.parametrize("after_entries", range(12, 60, 4))
def test_rank_killed_at_any_time(campaign: Arena, after_entries: int) -> None:
    """A rank is killed while it trains, copies, writes, votes or commits. The head is old or new, and the run ends exact."""
    run = f"asynchronous-any-{after_entries}"
    launch = campaign.launch(campaign.spec(run, passes=1, every_steps=10, **MODE))
    while len(campaign.entries(run)) < after_entries:
        assert launch.process.poll() is None
    os.kill(launch.ranks()[after_entries // 4 % 2].pid, signal.SIGKILL)
    check_finished(campaign, run, launch)
