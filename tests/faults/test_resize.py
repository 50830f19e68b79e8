from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.mark.soak
def test_run_resumes_with_other_world_size(campaign: Arena) -> None:
    """From 2 ranks to 1 to 4 the global batches equal an undisturbed run's. The losses differ by rounding only."""
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

    assert {row.world_size for row in campaign.lineage(run)} == {1, 2, 4}
    assert campaign.journal(run) == campaign.journal("reference")
    assert campaign.losses(run) == pytest.approx(campaign.losses("not-resized"), rel=1e-5)


@pytest.mark.soak
@pytest.mark.timeout(900)  # up to four launches
@pytest.mark.parametrize(
    ("engine", "world_sizes"),
    list(itertools.product(("zero1", "zero2", "zero3", "dcp"), ((2, 1), (2, 1, 2), (2, 4), (1, 2)))),
)
def test_sharded_state_resumes_with_other_world_size(
    campaign: Arena, engine: str, world_sizes: tuple[int, ...]
) -> None:
    """A run that resumes with more or fewer ranks has the same rows. Its losses differ by rounding only."""
    program = "train_fsdp2.py" if engine == "dcp" else "train_deepspeed.py"
    settings = {"stage": engine[-1], "dropout": 0, "passes": 1, "steps": 40, "env": {"DS_ACCELERATOR": "cpu"}}
    whole = f"{engine}-not-resized-{world_sizes[0]}"
    if campaign.head(whole) is None:
        undisturbed = campaign.launch(campaign.spec(whole, program, world_size=world_sizes[0], **settings))
        assert undisturbed.wait() == 0, undisturbed.stderr
    run = f"{engine}-{'-'.join(map(str, world_sizes))}"
    for world_size in world_sizes[:-1]:
        launch = campaign.launch(campaign.spec(run, program, pause_s=0.05, world_size=world_size, **settings))
        launch.wait_for("checkpoint")
        os.kill(launch.process.pid, signal.SIGTERM)
        assert launch.wait() == 0, launch.stderr
        assert launch.of("ended")[0]["ending"] == "stopped"
    last = campaign.launch(campaign.spec(run, program, world_size=world_sizes[-1], **settings))
    assert last.wait() == 0, last.stderr

    assert {row.world_size for row in campaign.lineage(run)} == set(world_sizes)
    reference = campaign.journal("reference")
    assert campaign.journal(run) == {step: reference[step] for step in range(1, 41)}
    assert campaign.losses(run) == pytest.approx(campaign.losses(whole), rel=1e-5)


@pytest.mark.soak
def test_frozen_rank_is_ended(campaign: Arena) -> None:
    """A rank without heartbeats is ended with its attempt, and the run finishes exact."""
    run = "hung"
    launch = campaign.launch(campaign.spec(run, pause_s=0.02, hang_timeout_s=25))
    launch.wait_for("checkpoint")
    os.kill(launch.ranks()[1].pid, signal.SIGSTOP)
    assert launch.wait() == 0, launch.stderr
    assert "no heartbeat" in launch.of("failure")[0]["cause"]
    assert campaign.journal(run) == campaign.journal("reference")
    assert campaign.losses(run) == campaign.losses("reference")
