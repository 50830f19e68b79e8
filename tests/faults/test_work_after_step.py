"""Work after `run.step_done` is part of the step: a restart has it, from a checkpoint and from memory."""

import json
from typing import Any

import pytest

from tests.conftest import Arena


def entries(arena: Arena, run: str) -> dict[int, dict[str, Any]]:
    """Return the last entry of the script's journal for each step."""
    lines = (arena.home / "journal" / f"{run}.jsonl").read_text().splitlines()
    return {entry["step"]: entry for entry in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "copying", "resumed"), [("", "", [10]), ("/dev/shm", "", [16]), ("/dev/shm", "7,8", [6, 7])]
)
def test_work_after_step_is_restored(arena: Arena, memory: str, copying: str, resumed: list[int]) -> None:
    """Schedule, average and evaluation after a step are an undisturbed run's, after SIGKILLs during copies of states too."""
    arena.table(appends=(1000,))
    settings: dict[str, Any] = {"passes": 1, "every_steps": 10, "memory": memory, "memory_every_steps": 1, "dies_at": 0}
    for run, dies in (("undisturbed", {}), ("killed", {"dies_copying": copying} if copying else {"dies_at": 17})):
        launch = arena.launched(arena.spec(run, "train_after_step.py", world_size=1, **{**settings, **dies}))
    assert [each["step"] for each in launch.of("attempt")] == [0, *resumed]
    assert entries(arena, "killed") == entries(arena, "undisturbed")
