from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.mark.soak
def test_another_number_of_ranks_continues_the_same_run(campaign: Arena) -> None:
    """From 2 ranks to 1 to 4: the global batches are those of an undisturbed run, the losses differ by rounding only."""
    undisturbed = campaign.launch(campaign.spec("not-resized", noise=0, world_size=1))
    run = "resized"
    for world_size in (2, 1):
        launch = campaign.launch(campaign.spec(run, noise=0, pause_s=0.02, world_size=world_size))
        launch.wait_for("checkpoint", 2)
        os.kill(launch.process.pid, signal.SIGTERM)
        assert launch.wait() == 0, launch.stderr
        assert launch.of("ended")[0]["ending"] == "stopped"
    last = campaign.launch(campaign.spec(run, noise=0, world_size=4))
    assert last.wait() == 0, last.stderr
    assert undisturbed.wait() == 0, undisturbed.stderr

    assert {row["world_size"] for row in campaign.lineage(run)} == {1, 2, 4}
    assert campaign.journal(run) == campaign.journal("reference")
    assert campaign.losses(run) == pytest.approx(campaign.losses("not-resized"), rel=1e-5)


@pytest.mark.soak
def test_a_frozen_rank_is_noticed(campaign: Arena) -> None:
    """A rank that gives no sign of life is ended with its attempt, and the run finishes exact."""
    run = "hung"
    launch = campaign.launch(campaign.spec(run, pause_s=0.02, hang_timeout_s=25))
    launch.wait_for("checkpoint")
    os.kill(launch.ranks()[1].pid, signal.SIGSTOP)
    assert launch.wait() == 0, launch.stderr
    assert "no sign of life" in launch.of("failure")[0]["cause"]
    assert campaign.journal(run) == campaign.journal("reference")
    assert campaign.losses(run) == campaign.losses("reference")
