"""Where a run is, from its ledger rows."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from catalog.branches import exclusions_in_force
from catalog.connect import Lakehouse
from catalog.ledger import Ledger
from catalog.recoveries import recoveries_of
from catalog.run_rows import checkpoint_rows, fence_of_rows, finished_of_rows
from dlac_pipeline.recover.claims import attempts_without_progress


def run_status(lakehouse: Lakehouse, run: str) -> dict[str, Any]:
    """Facts about a run by name.

    Raises:
        NoSuchRun: the ledger has no row of it.
    """
    rows = Ledger(lakehouse).head_rows(run)
    fence, finished = fence_of_rows(rows), finished_of_rows(rows)
    head = checkpoint_rows(rows).get(fence.head or "")
    said = {} if head is None or not head["detail"] else json.loads(head["detail"])
    losses = [] if head is None else head["losses"] or []
    return {
        "run": run,
        "state": "finished" if finished else "open",
        "step": 0 if head is None else head["step"],
        "loss": losses[-1] if losses else None,
        "head_checkpoint": fence.head,
        "head_age_s": None if head is None else round((datetime.now(UTC) - head["committed_at"]).total_seconds(), 1),
        "checkpoint_reason": said.get("reason"),
        "checkpoint_interval_s": None if "interval_s" not in said else round(said["interval_s"], 1),
        "checkpoint_interval_why": said.get("why"),
        "checkpoints": len(checkpoint_rows(rows)),
        "attempt": fence.attempt,
        "attempts_without_progress": 0 if finished else attempts_without_progress(rows),
        "excluded_by_rewinds": [each.where for each in exclusions_in_force(rows)],
        "recoveries": sum(each.outcome == "resumed" for each in recoveries_of(lakehouse, run)),
    }
