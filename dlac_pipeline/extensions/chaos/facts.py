"""A reported fault, and its facts in the ledger and the `recoveries` table: who noticed it, its costs, and its quarantines."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import QuarantinedCheckpointRow

PHASES = ("detect_s", "schedule_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s")


@dataclass(kw_only=True, slots=True)
class Fault:
    """A reported fault. Moments are seconds since the epoch."""

    number: int
    kind: str
    run: str
    mode: str
    """The run's mode of checkpoints, or replicas."""
    step: int
    """The run's last finished step."""
    what: str
    during: int | None
    """The fault from which the run was still being recovered, or None."""
    struck_at: float
    lifted_at: float
    runs: list[str]
    """All runs that it struck."""
    recovery_s: float | None = None
    """Seconds from the strike to the first new step of every struck run, or until all conditions hold."""
    attempts: int | None = None
    """Attempts that began between the strike and the first new step. None: they were not counted."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Its facts in the `recoveries` table and the ledger."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def add_facts(lakehouse: Lakehouse, faults: Sequence[Fault]) -> None:
    """Add the recorded facts to each fault. A recovery of a run belongs to the last fault that had struck it by then."""
    noticed: dict[int, list[Recovery]] = {fault.number: [] for fault in faults}
    quarantined: dict[int, int] = dict.fromkeys(noticed, 0)
    for run in sorted({run for fault in faults for run in fault.runs}):
        struck = sorted((fault.struck_at, fault.number) for fault in faults if run in fault.runs)
        for recovery in recoveries_of(lakehouse, run):
            number = last_before(struck, recovery.failed_at.timestamp() + recovery.detect_s)
            if number is not None:
                noticed[number].append(recovery)
        for row in Ledger(lakehouse).rows(run, kinds=(QuarantinedCheckpointRow,)):
            number = last_before(struck, row.committed_at.timestamp())
            if number is not None:
                quarantined[number] += 1
    for fault in faults:
        fault.summary = {**_summed(noticed[fault.number]), "quarantined": quarantined[fault.number]}


def last_before(struck: Iterable[tuple[float, int]], moment: float) -> int | None:
    """Return the number of the last fault that had struck by a moment. `struck` is in order."""
    return max(itertools.takewhile(lambda each: each[0] <= moment, struck), default=(0.0, None))[1]


def _summed(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """Return one fault's detectors, and the added phases of all recoveries of the slowest run."""
    by_run: dict[str, list[Recovery]] = {}
    for recovery in recoveries:
        by_run.setdefault(recovery.run, []).append(recovery)
    longest = max(by_run.values(), key=lambda each: sum(one.total_s for one in each), default=[])
    return {
        "recoveries": len(recoveries),
        "noticed_by": sorted({recovery.noticed_by for recovery in recoveries}),
        "causes": [recovery.cause for recovery in recoveries],
        "outcomes": [recovery.outcome for recovery in recoveries],
        "rows_replayed": sum(recovery.rows_replayed for recovery in recoveries),
        "work_lost_s": round(sum(recovery.work_lost_s or 0.0 for recovery in recoveries), 2),
        **{phase: round(sum(getattr(each, phase) or 0.0 for each in longest), 2) for phase in PHASES},
    }
