"""Whole runs on a fake accelerator, in their own processes."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import PROGRAMS, Arena


def train(arena: Arena, spec: JobSpec) -> subprocess.CompletedProcess[str]:
    """Train by a spec."""
    path = arena.home / f"{spec.run}.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    command = [sys.executable, str(PROGRAMS / "train_on_fake_device.py"), str(path)]
    environment = {**os.environ, "DLAC_HOME": str(arena.home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def spec_of(arena: Arena, run: str, **changes: Any) -> JobSpec:
    """Return the spec of one rank, with a checkpoint every 5 steps."""
    return arena.spec(run, world_size=1, passes=1, every_steps=5, **changes)


@pytest.mark.slow
def test_device_run_is_identical(arena: Arena) -> None:
    """Rows and recorded losses equal a CPU run's, and no step waits for its loss."""
    arena.table(appends=(600,))
    expected = arena.train(spec_of(arena, "host"))
    result = train(arena, spec_of(arena, "device"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert {int(step): rows for step, rows in found["seen"].items()} == expected
    assert not any(found["waited"])
    losses = [[loss for row in arena.lineage(run) for loss in row.losses] for run in ("host", "device")]
    assert losses[0] == losses[1]
    assert len(losses[1]) == len(expected) == 19


@pytest.mark.soak
def test_next_attempt_waits_for_losses(arena: Arena) -> None:
    """Each step waits for its loss until the first checkpoint. A late error would be blamed on the rows of a later step."""
    arena.table(appends=(600,))
    assert train(arena, spec_of(arena, "device", dies_at=8)).returncode == 1
    result = train(arena, spec_of(arena, "device"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found["seen"]) == [str(step) for step in range(6, 20)]
    assert found["waited"] == [True] * 5 + [False] * 9
