"""Processes of benchmarks: programs with a time limit, kept results, compared loaders, and `benchmarks.gpu` on the CPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import PARTS
from benchmarks.gpu_parts.node import PROGRAMS, run_program
from benchmarks.gpu_parts.page import page_of
from benchmarks.peer_loaders.ranks import Ranks
from benchmarks.results.record import record
from dlac_pipeline.elastic.ranks.addresses import free_port


def test_program_without_end_is_killed(tmp_path: Path) -> None:
    """So are its children. A program that prints nothing has failed."""
    file = tmp_path / "child"
    child = f"import pathlib, time; time.sleep(2); pathlib.Path({str(file)!r}).touch()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(RuntimeError, match="to end within 1 s, found it running"):
        run_program([sys.executable, "-c", program], limit_s=1.0)
    time.sleep(2)
    assert not file.exists()
    with pytest.raises(RuntimeError, match="to print its figures and end with status 0, found 0"):
        run_program([sys.executable, "-c", ""])


def test_result_is_kept_if_program_prints_figures(tmp_path: Path) -> None:
    """A missed bar is kept. A program that prints no figures leaves the earlier result."""
    file = tmp_path / "one.json"
    figures = {"median_s": {"value": 3, "unit": "s", "bar": "<= 1", "holds": False}}
    program = f"print({json.dumps(json.dumps({'benchmark': 'one', 'figures': figures}))}); raise SystemExit(1)"
    command = [sys.executable, "-c", program]
    assert record(command, file, program="one") == 1
    kept = json.loads(file.read_text())
    assert (kept["program"], kept["figures"]) == ("one", figures)
    assert {"day", "commit", "machine", "load", "minutes"} <= kept.keys()
    with pytest.raises(SystemExit, match="expected the figures of one on its last line, found '' and exit status 2"):
        record([sys.executable, "-c", "raise SystemExit(2)"], file, program="one")
    assert json.loads(file.read_text()) == kept


def _step(rank: int, port: int, batches: int, found: Any) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in place.items()}
    ranks = Ranks(2)
    found.put((rank, list(ranks.step_together(iter(range(batches)))), ranks.gather(rank)))


def test_rank_without_batches_waits() -> None:
    """A rank with fewer batches takes part in the steps of its peer, and both end together."""
    context, port = multiprocessing.get_context("fork"), free_port()
    found = context.Queue()
    processes = [context.Process(target=_step, args=(rank, port, 1 + 2 * rank, found)) for rank in range(2)]
    for process in processes:
        process.start()
    results = sorted(found.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert results == [(0, [0], [0, 1]), (1, [0, 1, 2], [0, 1])]


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
