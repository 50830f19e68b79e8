"""Checkpoints committed in the background have the state of the copied step, whatever process is killed at any time."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow

if TYPE_CHECKING:
    from tests.conftest import Arena, Launch

MODE = {"mode": "asynchronous"}
STEPS = [10, 20, 30, 40, 50, 60, 63]


def check_finished(campaign: Arena, run: str, launch: Launch) -> None:
    """Check that the run finished, every checkpoint exists once, and rows and losses equal the undisturbed run's."""
    assert launch.wait() == 0, launch.stderr
    assert [row.step for row in campaign.lineage(run)] == STEPS
    assert len(campaign.rows(run, CheckpointRow)) == len(STEPS)
    reference, journal = campaign.journal("reference"), campaign.journal(run)
    assert {step: journal[step] for step in range(1, 63)} == {step: reference[step] for step in range(1, 63)}
    assert sorted(row for rows in journal.values() for row in rows) == list(range(2000))
    assert campaign.losses(run)[:62] == campaign.losses("reference")[:62]


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
@pytest.mark.parametrize(("moment", "resumed_at"), [("after", 20), ("before", 10)])
def test_coordinator_killed_around_commit(campaign: Arena, moment: str, resumed_at: int) -> None:
    """The head is the old or the new checkpoint, as in synchronous mode, although training had continued."""
    run = f"asynchronous-killed-{moment}"
    spec = campaign.spec(
        run, "train_sabotaged.py", env={"SABOTAGE": f"kill-{moment}-commit@20"}, passes=1, pause_s=0.02, **MODE
    )
    launch = campaign.launch(spec)
    check_finished(campaign, run, launch)
    first, second = launch.of("attempt")
    assert (first["step"], second["step"]) == (0, resumed_at)


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
    assert sorted(row for rows in campaign.journal(run).values() for row in rows) == list(range(2000))
    assert campaign.losses(run)[:62] == campaign.losses("reference")[:62]


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
