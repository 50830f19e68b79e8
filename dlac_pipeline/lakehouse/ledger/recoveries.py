"""The `recoveries` table: one row per recovery, with its phases, and one where a run was given up."""

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import schema_to_pyarrow

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, equals
from dlac_pipeline.lakehouse.ledger.plans import append_own
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION, RECOVERIES

_ARROW = schema_to_pyarrow(RECOVERIES, include_field_ids=False)
_OPERATOR = "operator"
"""`noticed_by`, where no program noticed."""
PHASES = ("detect", "schedule", "stop", "claim", "verify", "convert", "load", "first_step", "total")
"""Phases of a recovery, in order: the columns of its seconds without their `_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """A recovery. Durations are in seconds, each phase after the one before it."""

    run: str
    seq: int
    """The `seq` of the claim that began it."""
    attempt: int
    """The attempt that recovered. For a run that was given up: the last one that failed."""
    replaced_attempt: int
    cause: str
    noticed_by: str
    failed_at: datetime
    """Last heartbeat of what failed."""
    resumed_from: str | None
    resumed_step: int
    rows_replayed: int
    """Rows that were read again: of steps that a rank had finished, and of abandoned checkpoints."""
    detect_s: float
    """Seconds from the last heartbeat to the notice."""
    schedule_s: float = 0.0
    """Seconds from a sensor's notice to the new launch. 0: the supervisor itself recovers."""
    stop_s: float = 0.0
    claim_s: float = 0.0
    verify_s: float = 0.0
    convert_s: float = 0.0
    """Seconds until the state was converted to another number of ranks, before the load."""
    load_s: float = 0.0
    """Seconds until all ranks have their state, with the rest of their start."""
    first_step_s: float = 0.0
    total_s: float
    outcome: str
    """Outcome: resumed, failed again (before its first step), gave up (no attempt followed), rejoined (a process group in
    the same attempt)."""
    format_version: int = FORMAT_VERSION
    work_lost_s: float = 0.0
    """Training of the failed attempt that is not in any checkpoint."""

    @property
    def down_s(self) -> float:
        """Seconds from the last heartbeat until an operator started the run again, or 0 where a program noticed."""
        return self.detect_s if self.noticed_by == _OPERATOR else 0.0

    @property
    def recovered_s(self) -> float:
        """Seconds of the recovery itself, without the operator's."""
        return self.total_s - self.down_s


def write_recovery(lakehouse: Lakehouse, recovery: Recovery, *, is_new: bool = False) -> None:
    """Append one recovery, once. `is_new`: no other call has tried to write it, so that the first try needs no look."""
    tries = itertools.count()

    def is_written() -> bool:
        if is_new and next(tries) == 0:
            return False
        known = recoveries_of(lakehouse, recovery.run)
        wanted = (recovery.attempt, recovery.outcome, recovery.failed_at)
        return any((found.attempt, found.outcome, found.failed_at) == wanted for found in known)

    append_own(lakehouse, "recoveries", recoveries_to_arrow([recovery]), unless=is_written)


def recoveries_to_arrow(recoveries: Iterable[Recovery]) -> pa.Table:
    """Return recoveries as the table has them."""
    return pa.Table.from_pylist([asdict(each) for each in recoveries], schema=_ARROW)


def recoveries_of(lakehouse: Lakehouse, run: str | None = None) -> list[Recovery]:
    """All recoveries of a run, or of every run, in order of `seq`."""
    wanted = AlwaysTrue() if run is None else equals("run", run)
    rows = lakehouse.read_own("recoveries", wanted).to_pylist()
    return [Recovery(**row) for row in sorted(rows, key=lambda row: (row["run"], int(row["seq"]), row["failed_at"]))]
