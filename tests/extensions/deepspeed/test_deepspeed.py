from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.mark.soak
def test_zero_1_resumes_bit_for_bit(campaign: Arena) -> None:
    """Of two DeepSpeed ranks one is killed after a checkpoint. Repeated steps have the same rows and losses."""
    run = "deepspeed"
    spec = campaign.spec(
        run, "train_deepspeed.py", passes=1, every_steps=20, pause_s=0.05, env={"DS_ACCELERATOR": "cpu"}
    )
    launch = campaign.launch(spec)
    launch.wait_for("checkpoint")
    while max(entry["step"] for entry in campaign.entries(run)) < 30:
        assert launch.process.poll() is None
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    assert launch.wait() == 0, launch.stderr

    assert [row.step for row in campaign.lineage(run)] == [20, 40, 60, 63]
    first, second = (
        {(e["rank"], e["step"]): (e["rows"], e["loss"]) for e in campaign.entries(run) if e["attempt"] == attempt}
        for attempt in (1, 2)
    )
    assert min(step for _, step in second) == 21
    repeated = first.keys() & second.keys()
    assert len(repeated) >= 18
    assert {key: first[key] for key in repeated} == {key: second[key] for key in repeated}
    assert sorted(row for rows in campaign.journal(run).values() for row in rows) == list(range(2000))
