"""Requests that `dlac chaos` refuses, before it starts a process."""

from typing import Any

import pytest
import yaml

from tests.conftest import Arena
from tests.fixtures import Command

KILL = ("--kill", "rank@step=5")


def refused(arena: Arena, here: Command, *options: str, run: str = "refused", **changes: Any) -> str:
    """Return the error of `dlac chaos` on a job."""
    path = arena.home / f"{run}.yaml"
    path.write_text(yaml.safe_dump(arena.spec(run, **changes).model_dump(mode="json", exclude_none=True)))
    done = here("chaos", str(path), *options, home=arena.home)
    assert done.returncode == 64, done.stderr
    assert "found" in done.stderr
    assert not list(arena.home.glob("checkpoints/*-chaos/launch-*"))
    return done.stderr


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, (), "found neither"),
        ({}, (*KILL, "--every", "60s"), "found both"),
        ({}, (*KILL, "--kinds", "rank"), "with --every only"),
        ({}, ("--kill", "rank:2@step=5"), "launch.world_size = 2"),
        ({}, ("--every", "often"), "such as 60s"),
        ({}, ("--every", "60s", "--kinds", "hang"), "hang_timeout_s below --healed-within"),
        ({}, ("--every", "60s", "--kinds", "network"), "leave network out"),
        ({}, (*KILL, "--out", "/no/such/folder/chaos.json"), "an existing folder"),
        ({"keep_last": 1}, ("--kill", "checkpoint@step=5"), "checkpoint.keep_last"),
        ({"on": "slurm"}, KILL, 'launch.on = "here"'),
        ({"store": "s3://bucket/path"}, ("--kill", "store@5s"), "leave the kind store out"),
    ],
)
def test_unsuitable_request_is_refused(
    arena: Arena, here: Command, changes: dict[str, Any], options: tuple[str, ...], expected: str
) -> None:
    """The error has what was expected, what was found, and what to do, or names the setting that excludes the fault."""
    assert expected in refused(arena, here, *options, **changes)


def test_existing_run_is_refused(arena: Arena, here: Command) -> None:
    """A run under chaos is a new one. The error names another one."""
    arena.table(appends=(100,))
    arena.train(arena.spec("mine-chaos", world_size=1, passes=1))
    assert "choose another name with --run" in refused(arena, here, *KILL, run="mine")
