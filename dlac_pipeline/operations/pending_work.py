"""Whether a run that follows its tables has something to train: its job spec in, what is due and why out. It only reads."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import HEAD_KINDS, checkpoint_rows, fence_of_rows, finished_of_rows
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.choose_leg import leg_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """What there is to do for a run."""

    needed: bool
    """Whether a launch has something to train, as far as the ledger and the tables tell."""
    why: str
    snapshot_ids: tuple[int, ...]
    """The present snapshot of each source."""
    head: str | None
    rewound: int
    """The `seq` of the run's last rewind; 0: there is none."""
    stepped_back: int
    """The `seq` of the last row that may have put an earlier head back, a rewind or a quarantine; 0: there is none."""


def due(lakehouse: Lakehouse, spec: JobSpec) -> Due:
    """What there is to do for the run of `spec`, which follows its tables.

    Rows that are too few for a batch stay pending: after a launch has seen that, only a new snapshot tells of more.

    Raises:
        NoSuchTable, NoSuchSnapshot: a source cannot be read.
    """
    present = tuple(snapshot_of(lakehouse.load(source.table), None).snapshot_id for source in spec.sources)
    rows = Ledger(lakehouse).rows(spec.run, kinds=HEAD_KINDS)
    head = fence_of_rows(rows).head
    back = {row["kind"]: int(row["seq"]) for row in rows if row["kind"] in ("rewind", "quarantine")}

    def answer(needed: bool, why: str) -> Due:
        return Due(
            needed=needed,
            why=why,
            snapshot_ids=present,
            head=head,
            rewound=back.get("rewind", 0),
            stepped_back=max(back.values(), default=0),
        )

    if finished_of_rows(rows):
        return answer(False, "it is finished")
    if head is None:
        return answer(True, "it has no checkpoint yet")
    planned = leg_of(rows, head).sources
    news = [
        f"{source.table} went on from snapshot {source.snapshot_id} to {now}"
        for source, now in zip(planned, present, strict=False)
        if source.follow == "appends" and source.snapshot_id != now
    ]
    if news:
        return answer(True, "; ".join(news))
    last = checkpoint_rows(rows)[head]
    if last["detail"] and json.loads(last["detail"]).get("reason") == "end":
        return answer(False, f"nothing is new in {', '.join(source.table for source in planned)}")
    return answer(True, f"it was left at step {last['step']}")
