"""DLAC beside DLRover's flash checkpoint: ranks of both are killed in turns, and resume from shared memory.

DLRover's own start of its master fails with torch 2.13, so the benchmark starts the master, as on a cluster.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure
from benchmarks.peer_loaders.environments import DLROVER, python_of
from benchmarks.programs.recovery_sizes import WIDTH
from benchmarks.recovery_lab.memory_run import SIZES, MemoryRun, Size
from benchmarks.recovery_lab.stamps import StampedRun, count_repeated, spent_on_states
from benchmarks.recovery_lab.training import PROGRAMS, RANKS, make_numbers, make_source
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from tests.conftest import wait_until

_DISK_STEPS = 50
"""Steps between DLRover's checkpoints on disk."""
_SHM = Path("/dev/shm")
_SOCKETS = Path("/tmp/ckpt_sock")
"""DLRover's folder of sockets, with one folder for each job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How ranks of both sides are killed."""

    kills: int
    quick_kills: int
    kills_per_turn: int
    memory_steps: int
    """Steps between two states in memory."""
    pause_s: float
    """The longest time between a recovery and the next kill, beyond three steps."""


COURSES = {
    "1.1M": Course(kills=20, quick_kills=3, kills_per_turn=5, memory_steps=1, pause_s=0.5),
    "100M": Course(kills=6, quick_kills=1, kills_per_turn=2, memory_steps=8, pause_s=10),
}


def compare_with_dlrover(name: str, home: Path, kills: int) -> dict[str, Figure]:
    """Kill ranks of both sides in turns. Then train on each side without kills."""
    course = COURSES[name]
    size = replace(SIZES[name], memory_steps=course.memory_steps)
    lakehouse = make_source(home)
    rows = torch.from_numpy(make_numbers()).view(-1, WIDTH)
    torch.save(rows[: len(rows) // size.batch * size.batch].clone(), home / "rows.pt")
    sides = [_Side("dlac", partial(MemoryRun, home)), _Side("dlrover", partial(DlroverRun, home))]
    chance = random.Random(7)
    turns = [course.kills_per_turn] * (kills // course.kills_per_turn) + [kills % course.kills_per_turn]
    for number, count in enumerate(filter(None, turns)):
        blows = [(chance.uniform(0.0, course.pause_s), chance.randrange(RANKS)) for _ in range(count)]
        for side in sides:
            side.kill(f"killed-{number}", size, blows)
    for side in sides:
        side.train_undisturbed(size)
    ours, theirs = (side.killed for side in sides)
    claims = [row for run in ours for row in Ledger(lakehouse).rows(run.name, kinds=(ClaimRow,)) if row.replaces]
    counts = [run.count_rows(sides[1].calm) for run in theirs]
    figures: dict[str, Figure] = {"kills": Figure(value=kills, unit="kills of a rank, per side")}
    for side in sides:
        figures |= side.figures(course)
    figures |= {
        "dlac_from_memory": Figure(value=sum(row.memory_of > 0 for row in claims), unit="recoveries"),
        "dlrover_from_memory": Figure(value=sum(run.count_loaded() for run in theirs), unit="recoveries"),
        "dlac_exact": Figure(value=sum(audit_run(lakehouse, run.name).exact for run in ours), unit=f"of {len(ours)}"),
        "dlrover_rows_repeated": Figure(value=sum(repeated for repeated, _ in counts), unit="rows"),
        "dlrover_rows_missing": Figure(value=sum(missing for _, missing in counts), unit="rows"),
    }
    return {f"{name}_{figure}": value for figure, value in figures.items()}


@dataclass
class _Side:
    """The runs of one side."""

    name: str
    make: Any
    killed: list[Any] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    calm: Any = None

    def kill(self, run_name: str, size: Size, blows: Sequence[tuple[float, int]]) -> None:
        """Start a run, and kill a rank of it some time after each recovery."""
        run = self.make(run_name, size)
        self.killed.append(run)
        with run.running():
            run.wait_for_steps(size.memory_steps + 3)
            for pause_s, rank in blows:
                time.sleep(pause_s)
                self.recovery_s.append(run.kill(run.ranks()[rank])[1])
                run.wait_for_steps(3)
        found = {"recovery_s": self.recovery_s[-len(blows) :], "load_average_1min": os.getloadavg()[0]}
        print(json.dumps({"side": self.name, "run": run_name, **found}), flush=True)

    def train_undisturbed(self, size: Size) -> None:
        """Train as many steps as the longest killed run."""
        self.calm = self.make("calm", size, steps=max(run.last_step for run in self.killed))
        with self.calm.running(to_the_end=True):
            pass

    def figures(self, course: Course) -> dict[str, Figure]:
        """Return what both sides have in common."""
        repeated = [steps for run in self.killed for steps in count_repeated(run.lines())]
        pairs = [pair for run in self.killed for pair in zip(run.losses(), self.calm.losses(), strict=False)]
        calm = self.calm.lines()[5:]
        kept = {each.step for each in calm if each.step % course.memory_steps == 0}
        found = {
            "recovery_s": (statistics.median(self.recovery_s), "s"),
            "recovery_most_s": (max(self.recovery_s), "s"),
            "steps_repeated": (statistics.mean(repeated), "finished steps, mean"),
            "steps_repeated_most": (max(repeated), "finished steps"),
            "losses_differing": (sum(one != other for one, other in pairs), "steps"),
            "losses_compared": (len(pairs), "steps"),
            "memory_bytes": (max(run.memory_bytes for run in self.killed), "bytes"),
            "step_s": ((calm[-1].done - calm[0].done) / (len(calm) - 1), "s"),
            "state_s": (statistics.median(spent_on_states(calm, kept)), "s"),
        }
        return {f"{self.name}_{figure}": Figure(value=value, unit=unit) for figure, (value, unit) in found.items()}


@dataclass
class DlroverRun(StampedRun):
    """One run that DLRover's agent and local master supervise."""

    home: Path
    name: str
    size: Size
    steps: int | None = None
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        self.folder = self.home / f"dlrover-{self.name}"
        self.stamps = self.folder / "stamps"
        self._log = self.folder / "log"
        self._job = f"dlac-bench-{os.getpid()}-{self.name}"

    @contextmanager
    def running(self, *, to_the_end: bool = False) -> Iterator[None]:
        """Run it, until the end of the block or of the run."""
        self.folder.mkdir()
        size = self.size
        settings = {
            "hidden": size.hidden,
            "layers": size.layers,
            "batch": size.batch,
            "memory_steps": size.memory_steps,
            "disk_steps": _DISK_STEPS,
            "steps": self.steps,
            "folder": str(self.folder),
            "rows": str(self.home / "rows.pt"),
        }
        file = self.folder / "settings.json"
        file.write_text(json.dumps(settings))
        python, port = python_of(DLROVER), free_port()
        master = ["-m", "dlrover.python.master.main", "--port", port, "--node_num", 1, "--platform", "local"]
        agent = [python.parent / "dlrover-run", "--nnodes=1", f"--nproc_per_node={RANKS}", "--max_restarts=1000"]
        with ExitStack() as stack:
            stack.callback(self._clean)
            stack.enter_context(self._process([python, *master, "--job_name", self._job], port))
            wait_until(partial(_is_served, port), what="DLRover's master", pause_s=0.1)
            launched = stack.enter_context(self._process([*agent, PROGRAMS / "dlrover_rank.py", file], port))
            yield
            if to_the_end and launched.wait() != 0:
                raise RuntimeError(f"expected DLRover to finish, found {self._log.read_text()[-2000:]}")
            self.memory_bytes = sum(path.stat().st_size for path in _SHM.glob(f"{self._job}_*"))

    @contextmanager
    def _process(self, command: Sequence[object], port: int) -> Iterator[subprocess.Popen[bytes]]:
        own = {
            "DLROVER_MASTER_ADDR": f"127.0.0.1:{port}",
            "ELASTIC_JOB_NAME": self._job,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
        }
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [str(each) for each in command], env=env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _clean(self) -> None:
        for path in _SHM.glob(f"{self._job}_*"):
            path.unlink()
        shutil.rmtree(_SOCKETS / self._job, ignore_errors=True)

    def _journal(self, rank: int) -> list[list[str]]:
        text = (self.folder / f"journal-{rank}").read_text()
        return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def ranks(self) -> list[int]:
        """Return the processes that wrote the last step."""
        return [int(self._journal(rank)[-1][0]) for rank in range(RANKS)]

    def _finished(self) -> list[dict[int, list[str]]]:
        """Return the loss and rows of each finished step, by rank. The last process that worked on a step counts."""
        last = self.last_step
        return [
            {int(step): rest for _, step, *rest in self._journal(rank) if int(step) <= last} for rank in range(RANKS)
        ]

    def losses(self) -> list[tuple[str, ...]]:
        """Return the losses of all ranks, in the order of the steps."""
        ranks = self._finished()
        return [tuple(found[step][0] for found in ranks) for step in sorted(ranks[0])]

    def count_rows(self, calm: DlroverRun) -> tuple[int, int]:
        """Return the number of rows that were repeated, and that are missing, beside as many undisturbed steps."""
        last = self.last_step
        consumed, expected = (
            Counter(
                row for found in run._finished() for step, (_, *rows) in found.items() if step <= last for row in rows
            )
            for run in (self, calm)
        )
        return (consumed - expected).total(), (expected - consumed).total()

    def count_loaded(self) -> int:
        """Return the number of restarts whose ranks loaded a state from memory."""
        return self._log.read_text(errors="replace").count("Load the state dict from the CPU memory buffer") // RANKS


def _is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
