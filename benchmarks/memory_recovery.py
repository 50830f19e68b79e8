"""From SIGKILL to the next step, by states in memory: `python -m benchmarks.memory_recovery [--quick] [--kills N] [--sizes X]`.

`--nodes` measures several nodes instead, each a network namespace with shared memory of its own. It needs root, iproute2 and
PostgreSQL. Two nodes of two ranks train the smallest model. By turns a rank, all ranks of a node, or a node is killed, and a
spare takes the place of the node. Then nodes are lost with their buddies in a run of three: it reads the store.

Two ranks train a model of 1.1 M parameters (replicated), of 100 M, or of 400 M (FSDP2; the state of the last one has 4.8 GB). In
turns a rank is killed, or all ranks of the node. The restart is the time to the next step, and the recovery that to a step
beyond the last one before the kill. The files of each checkpoint are destroyed once it is committed: a recovery
that read one would fail. An undisturbed run of as many steps follows, whose losses must be the same. Work at risk is the longest
time between two states, and overhead the time of `step_done` in steps that keep a state, beyond its median in other steps, as a
share of all steps. Both are of the undisturbed run. Steps are timed by the ranks, kills by this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.recovery_lab.nodes import measure_nodes
from benchmarks.recovery_lab.training import PROGRAMS, RANKS, make_source
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.memory.states import memory_folder, read_states
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SHM = "/dev/shm"
_PHASES = ("detect_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s", "total_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model, and how it is killed."""

    hidden: int
    layers: int
    batch: int
    memory_steps: int
    """Steps between two states. 0: chosen by DLAC."""
    checkpoint_s: float
    kills: int
    quick_kills: int
    sharded: bool
    calm_steps: int
    """Least steps of the undisturbed run."""
    recovery_bar: str


SIZES = {
    "1.1M": Size(
        hidden=1024, layers=1, batch=64, memory_steps=1, checkpoint_s=10, kills=200, quick_kills=6, sharded=False, calm_steps=100,
        recovery_bar="<= 1.0",
    ),
    "100M": Size(
        hidden=4096, layers=6, batch=8, memory_steps=0, checkpoint_s=600, kills=20, quick_kills=2, sharded=False, calm_steps=60,
        recovery_bar="<= 2.5",
    ),
    "400M": Size(
        hidden=8192, layers=6, batch=8, memory_steps=1, checkpoint_s=3600, kills=4, quick_kills=2, sharded=True, calm_steps=0,
        recovery_bar="<= 10",
    ),
}  # fmt: skip


def main() -> None:
    """Kill, compare, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=0, help="At each size, instead of the usual number.")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument(
        "--nodes", action="store_true", help="Several nodes instead. --kills is the number of all kills."
    )
    chosen = parser.parse_args()
    figures: dict[str, Figure] = {}
    if chosen.nodes:
        figures = measure_nodes(chosen.kills or (6 if chosen.quick else 300), pairs=1 if chosen.quick else 5)
    for name in () if chosen.nodes else chosen.sizes:
        size = SIZES[name]
        with tempfile.TemporaryDirectory(prefix="dlac-memory-") as home:
            kills = chosen.kills or (size.quick_kills if chosen.quick else size.kills)
            figures |= _measure(name, size, Path(home), kills)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("memory_recovery", figures)


def _measure(name: str, size: Size, home: Path, kills: int) -> dict[str, Figure]:
    lakehouse = make_source(home)
    killed = _Run(home, "killed", size)
    found: dict[str, list[float]] = {"rank": [], "node": []}
    restarts: dict[str, list[float]] = {"rank": [], "node": []}
    chance = random.Random(7)
    with killed.running():
        killed.wait_for_steps(4)
        for number in range(kills):
            time.sleep(chance.uniform(0.0, 0.5))
            kind = ("rank", "node")[number % 2]
            restart_s, recovery_s = killed.kill(chance.choice(killed.pids) if kind == "rank" else None)
            restarts[kind].append(restart_s)
            found[kind].append(recovery_s)
            killed.wait_for_steps(3)
    steps = max(size.calm_steps, killed.last_step)
    calm = _Run(home, "calm", size, steps=steps)
    with calm.running(to_the_end=True):
        pass
    print(json.dumps({"size": name, "recovery_s": found}), flush=True)
    phases = {each: statistics.median(one[each] for one in killed.recovered) for each in _PHASES}
    print(json.dumps({"size": name, "phases": phases}), flush=True)
    losses, undisturbed = (_losses(lakehouse, each.spec.run) for each in (killed, calm))
    claims = [row for row in Ledger(lakehouse).rows("killed", kinds=(ClaimRow,)) if row.replaces]
    figures = {
        f"{name}_{kind}_restart_s": Figure(value=statistics.median(values), unit="s")
        for kind, values in restarts.items()
        if values
    }
    figures |= {
        f"{name}_{kind}_recovery_{which}s": Figure(value=summary(values), unit="s", bar=bar)
        for kind, values in found.items()
        for which, summary, bar in (("", statistics.median, size.recovery_bar), ("most_", max, None))
        if values
    }
    replayed = max(each["rows_replayed"] for each in killed.recovered) / size.batch
    figures |= {
        f"{name}_kills": Figure(value=kills, unit="kills"),
        f"{name}_from_memory": Figure(
            value=sum(row.memory_of > 0 for row in claims), unit="recoveries", bar=f">= {kills}"
        ),
        f"{name}_replayed": Figure(value=replayed, unit="batches", bar="<= 2"),
        f"{name}_losses_differing": Figure(
            value=sum(one != other for one, other in zip(losses, undisturbed, strict=False)), unit="steps", bar="<= 0"
        ),
        f"{name}_losses_compared": Figure(value=min(len(losses), len(undisturbed)), unit="steps"),
        f"{name}_exact": Figure(value=audit_run(lakehouse, "killed").exact, unit="of 1", bar=">= 1"),
    }
    return figures if not size.calm_steps else figures | calm.costs(name, is_chosen=not size.memory_steps)


def _losses(lakehouse: Lakehouse, run: str) -> list[float]:
    rows = Ledger(lakehouse).rows(run, kinds=(CheckpointRow,))
    return [loss for row in rows for loss in row.losses]


@dataclass
class _Run:
    """One run under its supervisor, in this process."""

    home: Path
    name: str
    size: Size
    steps: int | None = None
    recovered: list[dict[str, Any]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    saved_at: dict[int, float] = field(default_factory=dict)
    """Step -> time, of the states that were seen in memory."""

    def __post_init__(self) -> None:
        self.stamps = self.home / f"{self.name}.stamps"
        size = self.size
        raw = {
            "run": self.name,
            "source": {"table": "src.rows", "columns": ["x"], "passes": 1_000},
            "order": {
                "batch_size": size.batch,
                "key_groups": 8,
                **({} if self.steps is None else {"steps": self.steps}),
            },
            "checkpoint": {
                "every_s": size.checkpoint_s,
                "keep_last": 2,
                "mode": "asynchronous",
                "memory": _SHM,
                "memory_every_steps": size.memory_steps,
            },
            "launch": {
                "script": str(PROGRAMS / "memory_rank.py"),
                "world_size": RANKS,
                "preload": ["dlac_pipeline.checkpoint.engines.distributed_state", "torch.distributed.fsdp"],
            },
            "params": {
                "stamps": str(self.stamps),
                "hidden": str(size.hidden),
                "layers": str(size.layers),
                "sharded": str(size.sharded),
            },
        }
        self.spec: JobSpec = parse_spec(raw, origin="the benchmark").resolved(self.home)
        self._supervisor = Supervisor(Request(spec=self.spec), on_event=self._record)

    def _record(self, event: dict[str, Any]) -> None:
        if event["event"] == "attempt":
            self.pids = event["pids"]
        if event["event"] == "recovered":
            self.recovered.append(event)
        if event["event"] == "checkpoint":
            for path in (self.home / "checkpoints" / self.name).glob("attempt-*/step-*/*[st]"):
                os.truncate(path, 0)

    @contextmanager
    def running(self, *, to_the_end: bool = False) -> Iterator[None]:
        """Run it, until the end of the block or of the run."""
        ended = threading.Event()
        thread = threading.Thread(target=self._supervisor.run)
        watch = threading.Thread(target=self._watch, args=(ended,))
        thread.start()
        watch.start()
        try:
            yield
        finally:
            if not to_the_end:
                self._supervisor.stop()
            thread.join()
            ended.set()
            watch.join()

    def _watch(self, ended: threading.Event) -> None:
        folder = memory_folder(self.spec)
        while not ended.wait(0.1):
            for state in read_states(folder) if folder is not None else ():
                self.saved_at[state.first.step] = state.first.saved_at

    def lines(self) -> list[tuple[int, int, float, float]]:
        """Process, step, and the times before and after `step_done`, of each finished step."""
        text = self.stamps.read_text() if self.stamps.exists() else ""
        found = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(int(pid), int(step), float(done), float(after)) for pid, step, done, after in found]

    @property
    def last_step(self) -> int:
        """The last step that was finished."""
        return max((step for _, step, _, _ in self.lines()), default=0)

    def wait_for_steps(self, count: int) -> None:
        """Wait for further steps."""
        before = len(self.lines())
        while len(self.lines()) < before + count:
            time.sleep(0.01)

    def kill(self, victim: int | None) -> tuple[float, float]:
        """Kill a process, or all ranks. Return the seconds to the next step, and to the first one that is new."""
        pids, reached = self.pids, self.last_step
        killed_at = time.time()
        for pid in pids if victim is None else [victim]:
            os.kill(pid, signal.SIGKILL)
        while True:
            later = [
                (step, done - killed_at) for pid, step, done, _ in self.lines() if pid not in pids and done > killed_at
            ]
            new = [after_s for step, after_s in later if step > reached]
            if new:
                return later[0][1], new[0]
            time.sleep(0.005)

    def costs(self, name: str, *, is_chosen: bool) -> dict[str, Figure]:
        """Return overhead and work at risk of an undisturbed run, without its first steps."""
        lines = self.lines()[5:]
        spent = {step: after - done for _, step, done, after in lines}
        kept = [step for step in spent if step in self.saved_at]
        usual = statistics.median([spent[step] for step in spent if step not in self.saved_at] or [0.0])
        total = lines[-1][3] - lines[0][3]
        moments = sorted(at for step, at in self.saved_at.items() if step in spent)
        gaps = [later - at for at, later in pairwise(moments)]
        overhead = sum(max(0.0, spent[step] - usual) for step in kept) / total
        return {
            f"{name}_overhead": Figure(value=overhead, unit="share of the time", bar="<= 0.02" if is_chosen else None),
            f"{name}_at_risk_s": Figure(value=max(gaps, default=0.0), unit="s", bar="<= 10" if is_chosen else None),
            f"{name}_step_s": Figure(value=total / (len(lines) - 1), unit="s"),
            f"{name}_state_s": Figure(value=statistics.median([spent[step] for step in kept] or [0.0]), unit="s"),
        }


if __name__ == "__main__":
    main()
