"""One run that DLAC trains, with states in memory or from the store alone, under a supervisor in this process.

It also has the sizes of its model.
"""

import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.recovery_lab.stamps import StampedRun, spent_on_states
from benchmarks.recovery_lab.training import PROGRAMS, RANKS
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.memory_states.states import SLOTS, memory_folder, read_states
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SHM = "/dev/shm"
_LAST_CHECKPOINT_S = 120.0
"""Time for the checkpoint at the end, whose losses are compared."""
_POINT_S = 9.0
"""Recovery point of a run whose states DLAC paces. Work at risk shall be 10 s at the most."""


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
    table_bytes: int = 0
    """Size of a frozen table, which is part of the state and costs no time in steps."""


SIZES = {
    "1.1M": Size(
        hidden=1024, layers=1, batch=64, memory_steps=1, checkpoint_s=10, kills=200, quick_kills=6, sharded=False, calm_steps=100,
        recovery_bar="<= 1.0",
    ),
    "100M": Size(
        hidden=4096, layers=6, batch=8, memory_steps=0, checkpoint_s=600, kills=20, quick_kills=2, sharded=False, calm_steps=60,
        recovery_bar="<= 2.0",
    ),
    "400M": Size(
        hidden=8192, layers=6, batch=8, memory_steps=1, checkpoint_s=3600, kills=4, quick_kills=2, sharded=True, calm_steps=0,
        recovery_bar="<= 8",
    ),
    "5GB": Size(
        hidden=256, layers=1, batch=64, memory_steps=1, checkpoint_s=3600, kills=4, quick_kills=2, sharded=True, calm_steps=0,
        recovery_bar="<= 10", table_bytes=5 * 10**9,
    ),
}  # fmt: skip


@dataclass
class MemoryRun(StampedRun):
    """One run under its supervisor, in this process."""

    home: Path
    name: str
    size: Size
    steps: int | None = None
    memory: str = _SHM
    """Folder of its states in memory. Empty: it keeps none."""
    keeps_checkpoints: bool = False
    """Its checkpoints stay whole, and it may resume from them."""
    cascade: int = 1
    """Kills in a row before the first new step, at most."""
    world_size: int = RANKS
    on_accelerator: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the ranks."""
    recovered: list[dict[str, Any]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    saved_at: dict[int, float] = field(default_factory=dict)
    """Step -> time, of the states that were seen in memory, or of the checkpoints of a run without them."""
    checkpoint_bytes: int = 0
    memory_bytes: int = 0
    """Shared memory that all states take."""

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
                "mode": "asynchronous" if self.memory else "synchronous",
                "memory": self.memory,
                "memory_every_steps": size.memory_steps,
                "memory_point_s": _POINT_S,
            },
            "launch": {
                "script": str(PROGRAMS / "memory_rank.py"),
                "world_size": self.world_size,
                "env": self.environment,
                "preload": ["dlac_pipeline.extensions.sharded.distributed_state", "torch.distributed.fsdp"],
                "attempts_without_progress": 2 + self.cascade,
                "deadline_s": _LAST_CHECKPOINT_S,
                **({"deaths_at_same_rows": 0} if self.cascade > 1 else {}),
            },
            "params": {
                "stamps": str(self.stamps),
                "hidden": str(size.hidden),
                "layers": str(size.layers),
                "sharded": str(size.sharded),
                "table_bytes": str(size.table_bytes),
                "on_accelerator": str(self.on_accelerator),
            },
        }
        self.spec: JobSpec = parse_spec(raw, origin="the benchmark").resolved(self.home)
        self._supervisor = Supervisor(Request(spec=self.spec), on_event=self._record)

    def ranks(self) -> list[int]:
        """Return the processes of the last attempt."""
        return self.pids

    def _record(self, event: dict[str, Any]) -> None:
        if event["event"] == "attempt":
            self.pids = event["pids"]
        if event["event"] == "recovered":
            self.recovered.append(event)
        if event["event"] == "checkpoint":
            self.checkpoint_bytes = event["bytes"]
            if not self.memory:
                self.saved_at[event["step"]] = time.time()
        if event["event"] == "checkpoint" and not self.keeps_checkpoints:
            # a folder may be removed meanwhile, because only the last checkpoints are kept
            with suppress(FileNotFoundError):
                for path in (self.home / "checkpoints" / self.name).glob("attempt-*/step-*/*[st]"):
                    os.truncate(path, 0)

    @contextmanager
    def running(self, *, to_the_end: bool = False) -> Iterator[None]:
        """Run it, until the end of the block or of the run."""
        ended = threading.Event()
        thread = threading.Thread(target=self._supervise)
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
            if (folder := memory_folder(self.spec)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
        if self.failure is not None:
            raise self.failure

    def _supervise(self) -> None:
        try:
            self._supervisor.run()
        except Exception as err:  # whatever it is, it has ended the run
            self.failure = err

    def _watch(self, ended: threading.Event) -> None:
        folder = memory_folder(self.spec)
        while not ended.wait(0.1):
            for state in read_states(folder) if folder is not None else ():
                self.saved_at[state.first.step] = state.first.saved_at
                self.memory_bytes = SLOTS * sum(size for rank in state.ranks for _, size in rank.files)

    def losses(self) -> list[float]:
        """Return the losses that the ledger has, in the order of the steps."""
        rows = Ledger(connect(self.spec.lakehouse)).rows(self.name, kinds=(CheckpointRow,))
        return [loss for row in rows for loss in row.losses]

    def costs(self, name: str, *, is_chosen: bool) -> dict[str, Figure]:
        """Return overhead and work at risk of an undisturbed run, without its first steps."""
        lines = self.lines()[5:]
        spent, total = spent_on_states(lines, self.saved_at), lines[-1].done - lines[0].done
        moments = sorted(self.saved_at[each.step] for each in lines if each.step in self.saved_at)
        gaps = [later - at for at, later in pairwise(moments)]
        overhead = max(0.0, sum(spent)) / total
        return {
            f"{name}_overhead": Figure(value=overhead, unit="share of the time", bar="<= 0.02" if is_chosen else None),
            **(
                {f"{name}_at_risk_s": Figure(value=max(gaps), unit="s", bar="<= 10" if is_chosen else None)}
                if gaps
                else {}
            ),
            f"{name}_step_s": Figure(value=total / (len(lines) - 1), unit="s"),
            f"{name}_state_s": Figure(value=statistics.median(spent or [0.0]), unit="s"),
        }
