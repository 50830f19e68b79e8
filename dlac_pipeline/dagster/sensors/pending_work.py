"""Pending work of a run that follows its tables: the rows that a launch could train. Of all tables only mirrors are written."""

from dataclasses import dataclass
from functools import partial

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.iceberg.sources import load_version
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows, finished_of_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, QuarantinedCheckpointRow, RewindRow
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.spec.job_spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Pending work of a run."""

    needed: bool
    """True if the ledger and the tables show rows that a launch could train."""
    reason: str
    snapshot_ids: tuple[int, ...]
    """The current snapshot of each source."""
    head: str | None
    rewound: int
    """The `seq` of the run's last rewind, or 0 without one."""
    stepped_back: int
    """The `seq` of the last row that may have restored an earlier head (a rewind or a quarantine), or 0."""


def due(lakehouse: Lakehouse, spec: JobSpec) -> Due:
    """Return the pending work for the run of `spec`, which follows its tables.

    Rows that are too few for a batch stay pending. After a launch has seen them, only a new snapshot can add more.
    Raise `NoSuchTable` or `NoSuchSnapshot` if a source cannot be read.
    """
    found = (snapshot_of(load_version(lakehouse, source.table), None, ref=source.ref) for source in spec.sources)
    present = tuple(snapshot.snapshot_id for snapshot in found)
    rows = Ledger(lakehouse).rows(spec.run, kinds=HEAD_KINDS)
    head = fence_of_rows(rows).head
    back = {row.kind: row.seq for row in rows if isinstance(row, RewindRow | QuarantinedCheckpointRow)}
    rewound, stepped_back = back.get(RewindRow.kind, 0), max(back.values(), default=0)
    answer = partial(Due, snapshot_ids=present, head=head, rewound=rewound, stepped_back=stepped_back)
    if finished_of_rows(rows):
        return answer(needed=False, reason="it is finished")
    if head is None:
        return answer(needed=True, reason="it has no checkpoint yet")
    planned = leg_of(rows, head).sources
    news = [
        f"{source.table} advanced from snapshot {source.snapshot_id} to {now}"
        for source, now in zip(planned, present, strict=False)
        if source.follow == "appends" and source.snapshot_id != now
    ]
    if news:
        return answer(needed=True, reason="; ".join(news))
    last = checkpoint_rows(rows)[head]
    if last.reason == "end":
        return answer(needed=False, reason=f"nothing is new in {', '.join(source.table for source in planned)}")
    return answer(needed=True, reason=f"it was left at step {last.step}")
