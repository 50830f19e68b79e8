import itertools
import os
import signal
from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.errors import NoProgress
from tests.conftest import Arena


@pytest.mark.soak
@pytest.mark.timeout(900)  # up to four launches
@pytest.mark.parametrize(
    ("engine", "world_sizes"),
    list(itertools.product(("torch", "zero1", "zero2", "zero3", "dcp"), ((2, 1, 4), (2, 1, 2), (2, 4), (1, 2)))),
)
def test_run_resumes_with_other_world_size(campaign: Arena, engine: str, world_sizes: tuple[int, ...]) -> None:
    """A run that resumes with more or fewer ranks has the same rows. Its losses differ by rounding only."""
    program = {"torch": "train_tiny.py", "dcp": "train_fsdp2.py"}.get(engine, "train_deepspeed.py")
    settings = {
        **{"stage": engine[-1], "dropout": 0, "noise": 0, "passes": 1, "steps": 40},
        "env": {"DS_ACCELERATOR": "cpu"},
    }
    whole = f"{engine}-not-resized-{world_sizes[0]}"
    if campaign.head(whole) is None:
        campaign.launched(campaign.spec(whole, program, world_size=world_sizes[0], **settings))
    run = f"{engine}-{'-'.join(map(str, world_sizes))}"
    for world_size in world_sizes[:-1]:
        launch = campaign.launch(campaign.spec(run, program, pause_s=0.05, world_size=world_size, **settings))
        launch.wait_for("checkpoint")
        os.kill(launch.process.pid, signal.SIGTERM)
        assert launch.wait() == 0, launch.stderr
        assert launch.of("ended")[0]["ending"] == "stopped"
    campaign.launched(campaign.spec(run, program, world_size=world_sizes[-1], **settings))
    assert {row.world_size for row in campaign.lineage(run)} == set(world_sizes)
    reference = campaign.journal("reference")
    assert campaign.journal(run) == {step: reference[step] for step in range(1, 41)}
    assert campaign.losses(run) == pytest.approx(campaign.losses(whole), rel=1e-5)


@pytest.mark.slow
def test_replays_continue_with_other_ranks(arena: Arena) -> None:
    """After a death in a replay, other ranks resume from memory. Each skipped step is replayed once, with its rows in order."""
    arena.table(appends=(640,))
    settings: dict[str, Any] = {"passes": 1, "memory": "/dev/shm", "memory_every_steps": 1}
    settings |= {"skips": "3,9,20,22", "on_skipped": "replay"}
    dying: dict[str, Any] = {"dies_at": 23, "deaths_at_same_rows": 0, "attempts_without_progress": 1}
    first = arena.launch(arena.spec("r", **settings, **dying))
    assert first.wait() == NoProgress.exit_code, first.stderr
    last = arena.launched(arena.spec("r", world_size=4, **settings))
    assert [event["step"] for event in last.of("attempt")] == [22]
    journal, report = arena.journal("r"), audit_run(arena.lakehouse, "r")
    assert [journal[step] for step in range(21, 25)] == [journal[step] for step in (3, 9, 20, 9)]
    assert (max(journal), report.exact, report.rows_consumed, report.rows_not_applied) == (24, True, 640, 0)
