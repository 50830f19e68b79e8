"""Whole runs and datasets on a fake accelerator, in their own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.lakehouse.errors import LossNotFinite
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import PROGRAMS, Arena


def use(arena: Arena, what: str, spec: JobSpec) -> subprocess.CompletedProcess[str]:
    """Train or read by a spec."""
    path = arena.home / f"{spec.run}.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    command = [sys.executable, str(PROGRAMS / "train_on_fake_device.py"), what, str(path)]
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
    result = use(arena, "train", spec_of(arena, "device"))
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
    assert use(arena, "train", spec_of(arena, "device", dies_at=8)).returncode == 1
    result = use(arena, "train", spec_of(arena, "device"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found["seen"]) == [str(step) for step in range(6, 20)]
    assert found["waited"] == [True] * 5 + [False] * 9


@pytest.mark.soak
def test_device_nan_stops_run(arena: Arena) -> None:
    """The head is the checkpoint before the first NaN, which is detected before the next checkpoint."""
    arena.table(appends=(600,))
    result = use(arena, "train", spec_of(arena, "device", nan_from=9))
    assert "LossNotFinite" in result.stderr
    assert "at step 9" in result.stderr
    status = run_status(arena.lakehouse, "device")
    assert (status["step"], status["state"]) == (5, "open")
    assert LossNotFinite.__name__ in status["gave_up"]


@pytest.mark.soak
def test_device_loader_is_identical(arena: Arena) -> None:
    """Order and contents are the same, with and without workers, for batches and for the results of a function."""
    arena.table(appends=(600,))
    result = use(arena, "read", spec_of(arena, "device"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == {"same": dict.fromkeys(("workers 0", "workers 1", "inputs", "pinned"), True), "steps": 19}
