import os
import signal

import pytest

from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from tests.conftest import Arena
from tests.faults.test_preemption import check_gone

STEPS = 40
"""Of a run whose launches are stopped: enough for several checkpoints."""


@pytest.mark.parametrize(
    ("number", "mode"),
    [
        (signal.SIGTERM, "synchronous"),
        pytest.param(signal.SIGTERM, "asynchronous", marks=pytest.mark.soak),
        pytest.param(signal.SIGUSR1, "synchronous", marks=pytest.mark.soak),
        pytest.param(signal.SIGHUP, "synchronous", marks=pytest.mark.soak),
    ],
)
def test_stop_makes_checkpoint_and_ends(campaign: Arena, number: signal.Signals, mode: str) -> None:
    """After a signal that ends a launch the run saves a checkpoint. The next launch resumes there and repeats nothing."""
    run = f"stopped-by-{number.name}-{mode}"
    launch = campaign.launch(campaign.spec(run, steps=STEPS, pause_s=0.1, mode=mode))
    launch.wait_for("checkpoint")
    os.kill(launch.process.pid, number)
    assert launch.wait() == 0, launch.stderr
    (ended,) = launch.of("ended")
    assert ended["ending"] == "stopped"
    assert campaign.lineage(run)[-1].step == ended["step"] == launch.of("stopped")[0]["step"]
    again = campaign.launched(campaign.spec(run, steps=STEPS))
    shares = [event["bytes"] / event["of"] for event in again.of("verifying")]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    reference = campaign.journal("reference")
    assert campaign.journal(run) == {step: reference[step] for step in range(1, STEPS + 1)}
    assert campaign.losses(run) == campaign.losses("reference")[:STEPS]
    assert again.of("attempt")[0]["step"] == ended["step"]
    assert recoveries_of(campaign.lakehouse, run) == []  # nothing had failed


@pytest.mark.soak
def test_death_of_orchestrator_is_stop(campaign: Arena) -> None:
    """When its standard input ends, the run exits after a checkpoint, even with a checkpoint at every step."""
    run = "orphaned"
    launch = campaign.launch(campaign.spec(run, pause_s=0.05, every_steps=1))
    launch.wait_for("checkpoint", 2)
    ranks = launch.ranks()
    launch.stdin.close()
    assert launch.wait() == 0, launch.stderr
    check_gone(ranks)
    assert launch.of("ended")[0]["ending"] == "stopped"
    assert campaign.lineage(run)[-1].step == launch.of("ended")[0]["step"] < 125
