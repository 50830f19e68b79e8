"""Checkpoints committed in the background have the state of the copied step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from tests.faults.undisturbed import STEPS, check_finished

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
