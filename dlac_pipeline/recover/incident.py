"""One incident: what failed, and the phases of the recovery from it, until the first new optimizer step is done."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from catalog.connect import Lakehouse
from catalog.ledger import Ledger, Row
from catalog.recoveries import Recovery, write_recovery
from dlac_pipeline.progress import Phase, Progress, read_progress
from dlac_pipeline.recover.coordinator import ResumePoint, idle, launch_folder_of
from dlac_pipeline.spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An attempt that ended without finishing; moments in seconds since the epoch."""

    cause: str
    noticed_by: str
    failed_at: float
    """Last sign of life of what failed."""
    noticed_at: float
    stopped_at: float
    """When none of its processes was left."""
    last_step: int
    """Last optimizer step that it finished."""
    kind: str = ""
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """What the error says besides, for programs."""


def failure_of_attempt(rows: list[Row], attempt: int, *, noticed_by: str) -> Failure | None:
    """What can be told of an attempt whose supervisor is gone, from the launch folder that its claim names.

    None for one that only adopted, rewound or forked.
    """
    if idle(rows, attempt):
        return None
    folder = launch_folder_of(rows, attempt)
    found: list[Progress] = []
    if folder:
        ranks = range(len(list(Path(folder).glob("progress-*"))))
        found = [progress for rank in ranks if (progress := read_progress(Path(folder), rank)) is not None]
    now = time.time()
    return Failure(
        cause=f"attempt {attempt} ended without finishing",
        noticed_by=noticed_by,
        failed_at=max((progress.at for progress in found), default=now),
        noticed_at=now,
        stopped_at=now,
        last_step=max((progress.step for progress in found), default=0),
    )


class Incident:
    """A recovery under way: `observe` the ranks until their first step is done, then `report`."""

    def __init__(self, spec: JobSpec, point: ResumePoint, failure: Failure) -> None:
        self._spec = spec
        self._point = point
        self._failure = failure
        self._resumable_at = time.time()
        self._loaded_at: float | None = None
        self._stepped_at: float | None = None

    def observe(self, progress: list[Progress]) -> bool:
        """Note the phases that the ranks have reached; true once all have finished a step, or all their work."""
        now = time.time()
        past_loading = all(found.phase >= Phase.TRAINING for found in progress)
        if self._loaded_at is None and past_loading:
            self._loaded_at = now
        stepped = all(found.step > self._point.step or found.phase == Phase.DONE for found in progress)
        if past_loading and stepped:
            self._stepped_at = now
        return self._stepped_at is not None

    def report(self, lakehouse: Lakehouse) -> dict[str, Any]:
        """Write the row of `recoveries`; returns it as an event."""
        point, failure = self._point, self._failure
        loaded = self._loaded_at or time.time()
        stepped = self._stepped_at or time.time()
        rows = Ledger(lakehouse).rows(self._spec.run, kinds=("claim",))
        seq = next(int(row["seq"]) for row in rows if row["nonce"] == point.nonce)
        recovery = Recovery(
            run=self._spec.run,
            seq=seq,
            attempt=point.attempt,
            replaced_attempt=point.replaces,
            cause=failure.cause,
            noticed_by=failure.noticed_by,
            failed_at=datetime.fromtimestamp(failure.failed_at, UTC),
            resumed_from=point.checkpoint_id,
            resumed_step=point.step,
            rows_replayed=max(0, failure.last_step - point.step) * self._spec.order.batch_size,
            detect_s=failure.noticed_at - failure.failed_at,
            stop_s=failure.stopped_at - failure.noticed_at,
            claim_s=point.claim_s,
            verify_s=point.verify_s,
            load_s=loaded - self._resumable_at,
            first_step_s=stepped - loaded,
            total_s=stepped - failure.failed_at,
            outcome="resumed",
        )
        write_recovery(lakehouse, recovery)
        row = asdict(recovery)
        return {"event": "recovered", **row, "failed_at": recovery.failed_at.isoformat()}
