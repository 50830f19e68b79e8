"""Fault tolerance per step: `python -m benchmarks.per_step [--quick] [--only SIDE,...] [--nodes]`.

Four replica groups train one pass over a table, and are killed by SIGKILL at random phases: forward, between the all-reduces of a
step, after `should_commit`, while a checkpoint is written, and while a newcomer heals. A sixth of the kills are of the lighthouse
(--quick: 10 kills in place of 100). The sides are DLAC (`launch.replicas`), and torchft alone with a StatefulDataLoader and with
its DistributedSampler, each under a loop that starts a dead group or lighthouse again. All sides have the same settings of
the lighthouse, model, batch and 20 ms of "computation" in a step.

- Rows repeated and missing are counted in the journal of the training functions: missing are those that the committed steps would
  have trained on with four groups. A step with another number of samples than the batch size has an odd batch. A side that takes
  more than three times its time is ended.
- Downtime is the time from a kill until the next step that a survivor commits, less the median step. That of the lighthouse is
  the time until the second next step, because the step in progress commits without it.
- The losses of DLAC are compared with those of an undisturbed run.
- With `--nodes` six groups train on three nodes (benchmarks/per_step_lab/nodes.py), and 60 times a process, a node, the leader or
  the lighthouse is killed, or a node is cut off (--quick: 5 times). Downtime is then the time until the second next step.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.figures import Figure, report
from benchmarks.per_step_lab.journal import LIGHTHOUSE, PHASES, GroupJournal, order_file, read_lines
from benchmarks.per_step_lab.nodes import measure_nodes
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.extensions.loader_check.tables import Lake
from dlac_pipeline.extensions.replicas.rank import read_lighthouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

GROUPS = 4
BATCH = 64
STEP_S = 0.03
"""Seconds of a step for the size of the table. A kill and the healing after it take about two seconds."""
KILL_EVERY_S = 2.5
_PROGRAMS = Path(__file__).parent / "programs"
_Lines = list[dict[str, Any]]


class Course:
    """One run of one side: its journal, its kills, and the end of the pass."""

    def __init__(self, home: Path, *, steps: int, kills: int, seed: int = 1) -> None:
        self.folder = home
        self.steps = steps
        self._kills = kills
        self._draw = random.Random(seed)
        home.mkdir()

    def disturb(self, is_running: Callable[[], bool], kill_lighthouse: Callable[[], None]) -> None:
        """Order a group to die every few seconds, in a random phase, or kill the lighthouse, until the last step or all kills."""
        killed, deadline = 0, time.monotonic() + 3 * self.steps * STEP_S
        while is_running() and time.monotonic() < deadline:
            time.sleep(KILL_EVERY_S if killed else KILL_EVERY_S / 2)
            phase = self._draw.choice((*PHASES, "lighthouse"))
            if killed == self._kills or not self._has_begun():
                continue
            killed += 1
            if phase == "lighthouse":
                kill_lighthouse()
                GroupJournal(str(self.folder), LIGHTHOUSE).write("died", phase=phase)
            elif phase == "healing":  # the process that replaces one which died in its forward pass dies while it heals
                group = self._draw.randrange(GROUPS)
                self._order(group, "forward", within_s=5.0)
                self._order(group, phase, within_s=20.0)
            else:
                self._order(0 if phase == "checkpoint" else self._draw.randrange(GROUPS), phase, within_s=10.0)

    def _has_begun(self) -> bool:
        return len({line["group"] for line in read_lines(self.folder) if line["event"] == "committed"}) == GROUPS

    def _order(self, group: int, phase: str, *, within_s: float) -> None:
        order, deadline = order_file(self.folder, group), time.monotonic() + within_s
        order.write_text(phase)
        while order.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        order.unlink(missing_ok=True)

    def figures(self, side: str) -> dict[str, Figure]:
        """Return what the journal shows."""
        lines = read_lines(self.folder)
        deaths = [line for line in lines if line["event"] == "died"]
        of_lighthouse = [line for line in deaths if line["group"] == LIGHTHOUSE]
        downtimes = list(_downtimes(lines, [line for line in deaths if line["group"] != LIGHTHOUSE]))
        dark = list(_downtimes(lines, of_lighthouse))
        steps = committed_rows(lines)
        count = Counter(row for step_rows in steps.values() for row in step_rows)
        by_phase = Counter(line["phase"] for line in deaths)
        print(json.dumps({"side": side, "deaths": by_phase, "downtimes_s": downtimes}), flush=True)
        found = {
            "rows_repeated": Figure(value=sum(count.values()) - len(count), unit="rows"),
            "rows_missing": Figure(value=max(steps) * BATCH - len(count), unit="rows"),
            "odd_batches": Figure(value=sum(len(each) != BATCH for each in steps.values()), unit="steps"),
            "steps": Figure(value=max(steps), unit="steps"),
            "kills": Figure(value=len(deaths), unit="kills"),
        }
        if downtimes:
            found["downtime_p50_s"] = Figure(value=statistics.median(downtimes), unit="s")
            found["downtime_max_s"] = Figure(value=max(downtimes), unit="s")
        if dark:
            found["lighthouse_downtime_max_s"] = Figure(value=max(dark), unit="s")
        return {f"{side}_{name}": figure for name, figure in found.items()}


def committed_rows(lines: _Lines) -> dict[int, list[int]]:
    """Return the rows of each step: those of its last try that committed in any group.

    With DLAC a try of W groups has the last W shares, also those of groups that did not see the commit. With torchft alone each
    group has rows of its own.
    """
    steps: dict[int, list[int]] = {}
    shares: dict[tuple[int, int], dict[int, list[int]]] = {}
    for line in lines:
        if line["event"] not in ("share", "committed"):
            continue
        groups = line.get("groups")
        if groups is None:
            if line["event"] == "committed":
                steps.setdefault(line["step"], []).extend(line["rows"])
            continue
        mine = shares.setdefault((line["step"], groups), {})
        if line["event"] == "share":
            mine.pop(line["group"], None)  # a repeated share becomes the last one
            mine[line["group"]] = line["rows"]
        else:
            steps[line["step"]] = [row for share in list(mine.values())[-groups:] for row in share]
    return steps


def _downtimes(lines: _Lines, deaths: _Lines) -> Iterator[float]:
    """Yield the seconds from each death to the next committed step of another group, less the median step."""
    committed: dict[int, float] = {}
    for line in lines:
        if line["event"] == "committed":
            committed.setdefault(line["step"], line["at"])
    moments = sorted(committed.values())
    step_s = statistics.median(np.diff(moments)) if len(moments) > 1 else 0.0
    for death in deaths:
        steps = 2 if death["group"] == LIGHTHOUSE else 1
        after = [moment for moment in moments if moment > death["at"] + 0.001][:steps]
        if len(after) == steps and death["phase"] != "healing":
            yield max(0.0, after[-1] - death["at"] - steps * float(step_s))


@contextmanager
def _rows(home: Path, count: int) -> Iterator[Lake]:
    """Make the table and the file of its rows."""
    lake = Lake(home)
    ids = np.arange(count)
    x = np.sin(ids[:, None] * np.array([1.0, 2.0, 3.0, 4.0])).astype(np.float32)
    table = pa.table({"row_id": ids, "x": pa.array(list(x), type=pa.list_(pa.float32()))})
    lake.create("rows", [table], 500)
    torch.save({"row_id": torch.from_numpy(ids), "x": torch.from_numpy(x), "batch_size": BATCH}, home / "rows.pt")
    yield lake


def job(home: Path, run: str) -> JobSpec:
    """Return the job spec of a run of DLAC."""
    raw = {
        "run": run,
        "source": {"table": "bench.rows", "columns": ["row_id", "x"]},
        "order": {"batch_size": BATCH, "key_groups": 16, "seed": 3},
        "checkpoint": {"every_steps": 20, "mode": "asynchronous", "keep_last": 2},
        "launch": {"script": str(_PROGRAMS / "per_step_rank.py"), "replicas": GROUPS},
        "params": {"journal": str(home / run)},
    }
    return parse_spec(raw, origin="the benchmark").resolved(home)


def run_dlac(home: Path, course: Course, run: str) -> None:
    """Train with DLAC."""
    spec = job(home, run)
    command = [sys.executable, "-m", "dlac_pipeline.extensions.clusters.supervisor_process"]
    with (home / f"{run}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
        assert process.stdin is not None
        process.stdin.write(json.dumps({"spec": spec.model_dump(mode="json")}).encode() + b"\n")
        process.stdin.flush()
        course.disturb(lambda: process.poll() is None, partial(_kill_lighthouse, Path(spec.checkpoint.local) / run))
    if process.poll() != 0:
        process.kill()
        process.wait()
        raise SystemExit(f"run {run} ended with {process.returncode}: {(home / f'{run}.log').read_text()[-2000:]}")


def _kill_lighthouse(folder: Path) -> None:
    """Kill the lighthouse of the last attempt in the local folder of a run."""
    found = read_lighthouse(max(folder.glob("launch-*/"), key=lambda each: each.stat().st_ctime))
    if found is not None:
        os.kill(found.pid, signal.SIGKILL)


def run_torchft(home: Path, course: Course, loader: str) -> None:
    """Train with torchft alone."""
    checkpoints = home / f"{loader}-checkpoints"
    checkpoints.mkdir()
    address = f"http://127.0.0.1:{(port := free_port())}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RUST_LOG": "error"}

    def start(group: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(_PROGRAMS / "per_step_lighthouse.py"), str(port)]
        if group != LIGHTHOUSE:
            numbers = [str(group), str(GROUPS), loader, address, str(home / "rows.pt")]
            arguments = [str(course.folder), str(checkpoints), str(course.steps)]
            command = [sys.executable, str(_PROGRAMS / "per_step_torchft.py"), *numbers, *arguments]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    processes = {number: start(number) for number in (LIGHTHOUSE, *range(GROUPS))}
    ended = threading.Event()

    def start_again() -> None:
        """Start what is dead again, until a group has done the last step."""
        while not ended.wait(0.05):
            for number, process in processes.items():
                if process.poll() == 0:
                    ended.set()
                elif process.poll() is not None:
                    processes[number] = start(number)

    keeper = threading.Thread(target=start_again)
    keeper.start()

    def kill_lighthouse() -> None:
        processes[LIGHTHOUSE].kill()  # the one that runs now

    course.disturb(lambda: not ended.is_set(), kill_lighthouse)
    ended.set()
    keeper.join()
    for process in processes.values():
        process.kill()
        process.wait()


def main() -> None:
    """Run all sides, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="dlac,stateful,sampler")
    parser.add_argument("--nodes", action="store_true")
    options = parser.parse_args()
    if options.nodes:
        figures = measure_nodes(*((5, 3) if options.quick else (60, 30)))
        report("per_step_nodes", {**figures, "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes")})
        return
    kills, sides = 10 if options.quick else 100, options.only.split(",")
    steps = int(kills * KILL_EVERY_S / STEP_S)
    figures = {}
    with tempfile.TemporaryDirectory(prefix="dlac-per-step-") as folder:
        home = Path(folder)
        with _rows(home, steps * BATCH) as lake:
            if "dlac" in sides:
                figures |= _measure_dlac(home, lake, steps=steps, kills=kills)
            for loader in ("stateful", "sampler"):
                if loader in sides:
                    course = Course(home / loader, steps=steps, kills=kills)
                    run_torchft(home, course, loader)
                    figures |= course.figures(loader)
    if "dlac_downtime_p50_s" in figures and "sampler_downtime_p50_s" in figures:
        ratio = figures["dlac_downtime_p50_s"].value / figures["sampler_downtime_p50_s"].value
        figures["downtime_against_torchft"] = Figure(value=ratio, unit="x", bar="<= 1.2")
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("per_step", figures)


def _measure_dlac(home: Path, lake: Lake, *, steps: int, kills: int) -> dict[str, Figure]:
    """Run DLAC without and with kills."""
    run_dlac(home, Course(home / "calm", steps=steps, kills=0), "calm")
    course = Course(home / "killed", steps=steps, kills=kills)
    run_dlac(home, course, "killed")
    figures = course.figures("dlac")
    for name in ("dlac_rows_repeated", "dlac_rows_missing", "dlac_odd_batches"):
        figures[name] = Figure(value=figures[name].value, unit=figures[name].unit, bar="<= 0")
    figures["dlac_downtime_p50_s"] = Figure(value=figures["dlac_downtime_p50_s"].value, unit="s", bar="<= 0.5")
    ledger = Ledger(lake.lakehouse)
    losses = {
        run: [loss for row in ledger.rows(run, kinds=(CheckpointRow,)) for loss in row.losses]
        for run in ("calm", "killed")
    }
    differences = [abs(a - b) / abs(a) for a, b in zip(losses["calm"], losses["killed"], strict=True)]
    figures["dlac_loss_difference"] = Figure(value=1e6 * max(differences), unit="ppm", bar="<= 10")
    attempts = len(ledger.rows("killed", kinds=(ClaimRow,)))
    figures["dlac_attempts"] = Figure(value=attempts, unit="attempts", bar="<= 1")
    lines = [line for line in read_lines(course.folder) if line["group"] != LIGHTHOUSE]
    deaths = sum(line["event"] == "died" for line in lines)
    figures["dlac_other_restarts"] = Figure(
        value=len({line["pid"] for line in lines}) - GROUPS - deaths, unit="processes", bar="<= 0"
    )
    is_exact = audit_run(lake.lakehouse, "killed").exact
    figures["dlac_audit_exact"] = Figure(value=float(is_exact), unit="true or false", bar=">= 1")
    return figures


if __name__ == "__main__":
    main()
