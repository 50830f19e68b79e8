"""The programs of `benchmarks.gpu`, run without an accelerator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS
from benchmarks.gpu_parts.node import PROGRAMS
from benchmarks.gpu_parts.page import page_of


@pytest.mark.soak
def test_kernels_are_named() -> None:
    """The operation has no deterministic implementation on the CPU either."""
    code = (
        "import json, torch, gpu_kernels\n"
        "pooled, at = torch.nn.functional.max_pool1d(torch.rand(1, 1, 8), 2, return_indices=True)\n"
        "print(json.dumps(gpu_kernels.name_kernels(lambda: torch.nn.functional.max_unpool1d(pooled, at, 2))))\n"
        "print(torch.are_deterministic_algorithms_enabled())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=PROGRAMS, capture_output=True, text=True, check=True)
    names, enabled = result.stdout.splitlines()
    assert json.loads(names) == ["max_unpooling2d_forward_out"]
    assert enabled == "False"


@pytest.mark.soak
def test_all_parts_run_on_cpu(tmp_path: Path) -> None:
    """Every part runs, the killed demo recovers with the same losses, and the page has all of them."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    kept = json.loads(out.read_text())
    assert not kept["failed"]
    if kept["machine"]["device"] == "cpu":
        took = {name for name in kept["figures"] if name.endswith("_took_s")}
        assert took == {f"{part}_took_s" for part in PARTS if part != "demo-default"}
    assert kept["figures"]["demo_recoveries_deterministic"]["value"] >= 1
    assert "?" not in page_of(kept)
