"""One training run of the campaign, as observed from outside: its ledger rows, processes and journal."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from dlac_pipeline.extensions.chaos.strikes import ranks_below
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, out_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, LedgerRow, QuarantinedCheckpointRow, RetireRow
from dlac_pipeline.spec.job_spec import JobSpec
from examples.demo.live_run import LiveRun

R = TypeVar("R", bound=LedgerRow)
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The run's state in the ledger at one moment."""

    attempt: int
    head: str | None
    finished: bool


class Trainee:
    """A run, and its sources of facts."""

    def __init__(self, lakehouse: Lakehouse, spec: JobSpec, journal: Path) -> None:
        self.spec = spec
        self.run = spec.run
        self.live = LiveRun(spec.checkpoint.local, spec.run)
        self._lakehouse = lakehouse
        self._journal = journal

    @property
    def has_replicas(self) -> bool:
        """True if its ranks are replica groups."""
        return self.spec.launch.replicas > 0

    @property
    def mode(self) -> str:
        """How it takes checkpoints, or replicas."""
        return "replicas" if self.has_replicas else self.spec.checkpoint.mode

    @property
    def folder(self) -> Path:
        """Its folder in the checkpoint store, which is also the local one."""
        return Path(self.spec.checkpoint.local) / self.run

    def seen(self) -> Seen:
        """Return the current state in the ledger."""
        state = Ledger(self._lakehouse).state(self.run)
        return Seen(attempt=state.fence.attempt, head=state.fence.head, finished=state.finished)

    def rows(self, *kinds: type[R]) -> list[R]:
        """Return its ledger rows of these kinds."""
        return Ledger(self._lakehouse).rows(self.run, kinds=kinds)

    def head_row(self) -> CheckpointRow | None:
        """Return the checkpoint that is its head."""
        head = self.seen().head  # before the rows: the run continues
        return checkpoint_rows(self.rows(CheckpointRow)).get(head or "")

    def lineage(self) -> list[CheckpointRow]:
        """Return the surviving checkpoints, oldest first."""
        head, chain = self.seen().head, []
        checkpoints = checkpoint_rows(self.rows(CheckpointRow))
        while head is not None:
            chain.append(checkpoints[head])
            head = checkpoints[head].parent
        return chain[::-1]

    def restorable(self) -> int:
        """Return how many checkpoints of the lineage can be restored."""
        out = out_of(self.rows(RetireRow, QuarantinedCheckpointRow))
        return sum(row.checkpoint_id not in out for row in self.lineage())

    def entries(self) -> list[Entry]:
        """Return the complete lines of its journal."""
        paths = self._journal.glob(f"{self.run}-*.jsonl")
        lines = [line for path in sorted(paths) for line in path.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def ranks(self) -> list[psutil.Process]:
        """Return the living ranks of the newest launch, or none unless all exist."""
        supervisor = self.live.supervisor()
        found = {} if supervisor is None else ranks_below(supervisor, self.run)
        return list(found.values()) if len(found) == self.spec.launch.world_size else []

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the newest launch, from the Dagster run's to the ranks, or none unless it trains."""
        supervisor = self.live.supervisor() if self.ranks() else None
        worker = None if supervisor is None else supervisor.parent()
        return [] if worker is None else [worker, *worker.children(recursive=True)]
