"""The campaign's environment: a lakehouse, a real Dagster on it, and training runs that are replaced when they finish."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.soak_faults.store import mounted
from benchmarks.soak_faults.trainee import Trainee
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor
from examples.demo.local_dagster import LocalDagster

_MODES = ("synchronous", "asynchronous", "replicas")
"""Modes of the runs that train at the same time. Two ranks with states in memory, by how they take checkpoints, or groups."""
RUNS = len(_MODES)
_GROUPS = 3
"""Replica groups of the third mode."""
_SCRIPT = Path(__file__).parents[1] / "programs" / "soak_rank.py"
_BATCH, _PASSES, _EVERY_STEPS, _KEEP_LAST = 32, 2, 10, 4
_SETTINGS = "[recovery]\nlost_after_s = 45\nwait_for_old_launch_s = 2\n"
_TICK_S = 0.25


@dataclass(slots=True)
class _Slot:
    """A slot in which one run after the other trains."""

    mode: str
    upcoming: JobSpec
    """Next run. Its job file is written before it trains, because the daemon loads its code location again each minute only."""
    number: int = 1
    trainee: Trainee | None = None
    launching: Future[str] | None = None


class Lab:
    """The environment. Use it inside `open_lab`, and call `tend` while waiting."""

    def __init__(self, home: Path, steps: int, *, can_fill: bool, services: ExitStack) -> None:
        self.home = home
        self.can_fill = can_fill
        self.steps = steps
        self.journal = home / "journal"
        self.journal.mkdir()
        (home / "orchestration.toml").write_text(_SETTINGS)
        self.lakehouse = _lakehouse(home, rows=steps * _BATCH // _PASSES)
        self.dagster = LocalDagster(home)
        self.daemon = psutil.Process()
        self.trainees: list[Trainee] = []
        """Every run so far, including finished ones."""
        self._services = services
        self._slots = [_Slot(mode, self._prepare(mode, 1)) for mode in _MODES]
        self._launcher = ThreadPoolExecutor(1)
        self._goes_on = True

    @property
    def store(self) -> Path:
        """The checkpoint store."""
        return self.home / "store"

    @property
    def catalog(self) -> Path:
        """The catalog's file."""
        return Path(self.lakehouse.config.uri.removeprefix("sqlite:///"))

    def start_daemon(self) -> None:
        """Start Dagster's daemon after the death of the one before, like a service manager."""
        self._services.close()
        self.daemon = self._services.enter_context(self.dagster.running())

    def stop_daemon(self) -> None:
        """End Dagster, with all processes that it started."""
        self._services.close()

    def train_references(self) -> dict[str, list[float]]:
        """Return the losses of undisturbed runs of two ranks, by the mode that they are compared with."""
        losses = {}
        for mode in ("synchronous", "replicas"):
            spec = self._spec(f"reference-{mode}", mode, pause_s=0.0)
            spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"replicas": 0, "world_size": 2})})
            trainee = Trainee(self.lakehouse, spec, self.journal)
            Supervisor(Request(spec=spec)).run()
            losses[mode] = [loss for row in trainee.lineage() for loss in row.losses]
        return {"asynchronous": losses["synchronous"], **losses}

    def tend(self) -> None:
        """Replace finished runs, then sleep for a moment."""
        for slot in self._slots:
            if slot.launching is not None:
                if not slot.launching.done():
                    continue
                slot.launching.result()
                slot.launching = None
            if self._goes_on and (slot.trainee is None or _is_finished(slot.trainee)):
                slot.trainee = Trainee(self.lakehouse, slot.upcoming, self.journal)
                self.trainees.append(slot.trainee)
                slot.launching = self._launcher.submit(self.dagster.train, slot.trainee.run)
                slot.number += 1
                slot.upcoming = self._prepare(slot.mode, slot.number)
        time.sleep(_TICK_S)

    def _prepare(self, mode: str, number: int) -> JobSpec:
        """Write the job file of a run."""
        spec = self._spec(f"soak-{mode}-{number}", mode, pause_s=0.1)
        self.dagster.write_job_file(spec)
        return spec

    def training(self) -> list[Trainee]:
        """Return the runs that train and are far from both ends, by slot."""
        found = [slot.trainee for slot in self._slots if slot.trainee is not None and slot.launching is None]
        return [one for one in found if _EVERY_STEPS < one.live.step() < self.steps - 150 and one.ranks()]

    def all_have_claimed(self) -> bool:
        """Return whether each launched run has claimed itself in the ledger, so that a recovery finds it."""
        return all(
            slot.launching is None and slot.trainee.seen().attempt > 0
            for slot in self._slots
            if slot.trainee is not None
        )

    def finish(self, within_s: float) -> None:
        """Start no more runs, and wait for the running ones.

        Raises:
            TrainingFailed: a run does not finish in time.
        """
        self._goes_on = False
        deadline = time.monotonic() + within_s
        training = list(self.trainees)
        while training := [one for one in training if not _is_finished(one)]:
            if time.monotonic() > deadline:
                stuck = [one.run for one in training]
                raise TrainingFailed(f"expected all runs to finish within {within_s:.0f} s, found {stuck!r} unfinished")
            self.tend()

    def _spec(self, run: str, mode: str, *, pause_s: float) -> JobSpec:
        replicas = mode == "replicas"
        return parse_spec(
            {
                "run": run,
                "source": {"table": "src.rows", "columns": ["row_id", "x"]},
                "order": {"batch_size": _BATCH, "key_groups": 4, "seed": 1, "passes": _PASSES},
                "checkpoint": {
                    "store": str(self.store),
                    "every_steps": _EVERY_STEPS,
                    "keep_last": _KEEP_LAST,
                    "mode": "asynchronous" if replicas else mode,
                },
                "launch": {
                    "script": str(_SCRIPT),
                    **({"replicas": _GROUPS} if replicas else {"world_size": 2}),
                    "deadline_s": 10,
                    "hang_timeout_s": 15,
                },
                "params": {
                    "journal": str(self.journal),
                    "pause_s": str(pause_s),
                    "noise": "0" if replicas else "0.01",  # each group has generators of its own
                },
            },
            origin="the campaign",
        ).resolved(self.home)


@contextmanager
def open_lab(home: Path, steps: int) -> Iterator[Lab]:
    """Yield an environment in an empty folder, with Dagster running. `steps` is the length of a run."""
    with mounted(home / "store") as can_fill, ExitStack() as services:
        lab = Lab(home, steps, can_fill=can_fill, services=services)
        try:
            lab.start_daemon()
            yield lab
        finally:
            services.close()


def _is_finished(trainee: Trainee) -> bool:
    try:
        return trainee.seen().finished
    except CatalogUnreachable:
        return False


def _lakehouse(home: Path, *, rows: int) -> Lakehouse:
    """Return a lakehouse with a table of (row_id, x) in four data files."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    lakehouse.create_namespace("src")
    ids = np.arange(rows)
    x = np.sin(ids[:, None] * np.array([1.0, 2.0, 3.0, 4.0])).astype(np.float32)
    table = pa.table({"row_id": pa.array(ids), "x": pa.array(list(x), type=pa.list_(pa.float32()))})
    made = lakehouse.catalog.create_table(
        "src.rows", table.schema, properties={"write.parquet.row-group-limit": str(max(1, rows // 40))}
    )
    for part in np.array_split(ids, 4):
        made.append(table.slice(int(part[0]), len(part)))
    return lakehouse
