from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mode", "seed"), [("synchronous", seed) for seed in range(20)] + [("asynchronous", seed) for seed in range(12)]
)
def test_random_rank_kill_changes_nothing(campaign: Arena, mode: str, seed: int) -> None:
    """A rank is killed while it starts, trains, copies, writes, votes or commits.

    The run finishes, its journal has every row once per pass, and batches and losses equal the undisturbed run's.
    """
    draw = random.Random(seed)
    run = f"kill-{mode}-{seed}"
    launch = campaign.launch(campaign.spec(run, pause_s=0.03, mode=mode))
    moment = draw.choice(["starting", "training", "training", "training"])
    if moment == "training":
        launch.wait_for("attempt")
        launch.wait_for("checkpoint")
        time.sleep(draw.uniform(0.0, 1.0))
    else:
        while len(launch.ranks()) < 2:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 2.0))
    victim = draw.choice(launch.ranks())
    os.kill(victim.pid, signal.SIGKILL)

    assert launch.wait() == 0, launch.stderr
    assert len(launch.of("attempt")) >= 1 + (moment == "training")
    assert launch.of("ended")[0]["ending"] == "finished"
    journal = campaign.journal(run)
    assert sorted(row for rows in journal.values() for row in rows) == sorted(2 * list(range(2000)))
    assert journal == campaign.journal("reference")
    assert campaign.losses(run) == campaign.losses("reference")
    recorded = campaign.recorded(run)
    for checkpoint in campaign.lineage(run):
        last = checkpoint.step
        first = last - checkpoint.applied_steps + 1
        assert recorded[last] == sorted(row for step in range(first, last + 1) for row in journal[step])
    attempts = {row.attempt for row in campaign.rows(run, ClaimRow)}
    assert attempts == set(range(1, len(attempts) + 1))
