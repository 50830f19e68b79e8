"""Incident: a failure, and the phases of the recovery until the first new step is done. A failed recovery has a row too."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of, write_recovery
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, claim_of, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, ClaimRow, LedgerRow, QuarantinedCheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.claims import left_in_order
from dlac_pipeline.supervise.failure import Failure, HangDetector
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, read_heartbeats
from dlac_pipeline.supervise.policies.stragglers import Stragglers
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder
from dlac_pipeline.supervise.start.resume_point import FromMemory, ResumePoint

_CHOICES = (ClaimRow, QuarantinedCheckpointRow)
"""Rows that say after which checkpoint an attempt resumes."""
RecoveryOutcome = Literal["resumed", "failed again", "gave up"]
_STEP_EVENT_EVERY_S = 0.5


class AttemptMonitor:
    """Monitor of the heartbeats of one attempt: its step, its slow and hung ranks, and its recovery from a failure."""

    def __init__(self, recorder: RecoveryRecorder, launch: LaunchSpec, publish: Callable[[Event], None]) -> None:
        self.step = 0
        """Last step that all ranks have finished."""
        self.hangs = HangDetector(launch)
        self.incident: Incident | None = None
        self._recorder = recorder
        self._publish = publish
        self._stragglers = Stragglers()
        self._published_step = (0, 0)
        self._published_at = -math.inf

    def observe(self, heartbeats: Sequence[RankHeartbeat | None]) -> None:
        """Note the heartbeats of all ranks, once each rank has sent one."""
        known = [found for found in heartbeats if found is not None]
        if len(known) < len(heartbeats):
            return
        self.step = max(self.step, min(found.step for found in known))
        if self.incident is not None and self.incident.observe(known):
            self.end_recovery("resumed")
        for straggler in self._stragglers.observe(known):
            self._publish(straggler.event())
        first, now = known[0], time.monotonic()
        step = (first.step, first.loss_step)
        if first.loss_step and step != self._published_step and now - self._published_at >= _STEP_EVENT_EVERY_S:
            self._published_step, self._published_at = step, now
            self._publish({"event": "step", "step": first.step, "loss_step": first.loss_step, "loss": first.loss})

    def end_recovery(self, outcome: RecoveryOutcome) -> None:
        """Have the recovery in progress recorded, if there is one."""
        incident, self.incident = self.incident, None
        if incident is not None:
            build = partial(incident.build_recovery, outcome=outcome, ended_at=time.time())
            self._recorder.record(build, incident.to_event, self._publish)

    def record_rejoined(self, ranks: RankGroup, spec: JobSpec, nonce: str) -> None:
        """Have the replaced ranks recorded that take part in the attempt of `nonce` again."""
        for rejoined in ranks.find_rejoined():
            self._recorder.record(partial(rejoined.build_recovery, spec, nonce), rejoined.to_event, self._publish)


class Incident:
    """A recovery in progress: `observe` the ranks until their first step is done, then `report`."""

    def __init__(self, spec: JobSpec, point: ResumePoint, failure: Failure) -> None:
        self._spec = spec
        self._point = point
        self._failure = failure
        self._resumable_at = time.time()
        self._loaded_at: float | None = None
        self._stepped_at: float | None = None
        self._convert_s = 0.0

    def observe(self, heartbeats: list[RankHeartbeat]) -> bool:
        """Note the phases that the ranks have reached. Return True once all have finished a step or all their work."""
        now = time.time()
        past_loading = all(found.phase >= Phase.TRAINING for found in heartbeats)
        self._convert_s = max(found.spent.convert_us for found in heartbeats) / 1e6
        if self._loaded_at is None and past_loading:
            self._loaded_at = now
        stepped = all(found.step > self._point.step or found.phase == Phase.DONE for found in heartbeats)
        if past_loading and stepped:
            self._stepped_at = now
        return self._stepped_at is not None

    def report(self, lakehouse: Lakehouse, outcome: RecoveryOutcome = "resumed") -> Event:
        """Write the row of `recoveries` and return it as an event."""
        recovery = self.build_recovery(lakehouse, outcome=outcome, ended_at=time.time())
        write_recovery(lakehouse, recovery, is_new=True)
        return self.to_event(recovery)

    def build_recovery(self, lakehouse: Lakehouse, *, outcome: RecoveryOutcome, ended_at: float) -> Recovery:
        """Return the row of `recoveries`, with what the ledger knows of it. `ended_at` is its end if no step was done."""
        point, failure = self._point, self._failure
        ended = self._stepped_at or ended_at
        loaded = self._loaded_at or ended
        ledger = Ledger(lakehouse)
        rows = ledger.rows(self._spec.run, kinds=HEAD_KINDS)
        claim = next(row for row in rows if isinstance(row, ClaimRow) and row.nonce == point.nonce)
        replayed = rows_replayed(ledger, rows, claim, worked_on=failure.rows, resumed_from=point.checkpoint_id)
        return Recovery(
            run=self._spec.run,
            seq=claim.seq,
            attempt=point.attempt,
            replaced_attempt=point.replaces,
            cause=failure.describe(),
            noticed_by=failure.noticed_by,
            failed_at=datetime.fromtimestamp(failure.failed_at, UTC),
            resumed_from=point.checkpoint_id,
            resumed_step=point.step,
            rows_replayed=replayed + _rows_replayed_before(lakehouse, rows, claim),
            detect_s=failure.noticed_at - failure.failed_at,
            schedule_s=failure.launched_at - failure.noticed_at,
            stop_s=failure.stopped_at - failure.launched_at,
            claim_s=point.claim_s,
            verify_s=point.verify_s,
            convert_s=self._convert_s,
            load_s=max(0.0, loaded - self._resumable_at - self._convert_s),
            first_step_s=ended - loaded,
            total_s=ended - failure.failed_at,
            outcome=outcome,
            work_lost_s=_work_lost_s(rows, point, failure),
        )

    def to_event(self, recovery: Recovery) -> Event:
        """Return the event of the written row."""
        event = "recovered" if recovery.outcome == "resumed" else "recovery_failed"
        times = {"down_s": recovery.down_s, "recovered_s": recovery.recovered_s}
        facts = {**asdict(recovery), "failed_at": recovery.failed_at.isoformat()}
        return {"event": event, **facts, "from_memory": isinstance(self._point, FromMemory), **times}


def rows_replayed(
    ledger: Ledger, rows: Sequence[LedgerRow], claim: ClaimRow, *, worked_on: int, resumed_from: str | None
) -> int:
    """Count the rows that the attempt of a claim reads again, of `worked_on` that the attempt before it had finished.

    From a state in memory these are the rows since that state. Otherwise they are the rows in no checkpoint, with those of the
    states that the attempt before it had continued, and the rows of abandoned checkpoints.
    """
    if claim.memory_of:
        return max(0, worked_on - (claim.memory_rows if claim.memory_of == claim.replaces else 0))
    heads = [row.head_after for row in rows if row.seq < claim.seq]
    kept = lineage_of(rows, resumed_from)
    abandoned = [each for each in lineage_of(rows, heads[-1] if heads else None) if each not in kept]
    continued = [claim_of(rows, claim.replaces)]
    while continued[-1].memory_of:
        continued.append(claim_of(rows, continued[-1].memory_of))
    attempts = {each.attempt for each in continued}
    committed = [name for name, row in checkpoint_rows(rows).items() if row.attempt in attempts]
    counted = ledger.consumed_by(claim.run, [*committed, *(each for each in abandoned if each not in committed)])
    worked_on += sum(each.memory_rows for each in continued)
    return max(0, worked_on - sum(counted[each].total() for each in committed)) + sum(
        counted[each].total() for each in abandoned
    )


def _rows_replayed_before(lakehouse: Lakehouse, rows: list[LedgerRow], claim: ClaimRow) -> int:
    """Count the rows that the attempts before a claim have read again whose recoveries are in no row: their supervisors died."""
    recorded = {each.attempt for each in recoveries_of(lakehouse, claim.run)}
    total, before = 0, claim_of(rows, claim.replaces)
    while before.replaces and before.trains and before.attempt not in recorded:
        replaced = claim_of(rows, before.replaces)
        if left_in_order(rows, replaced.attempt):
            break
        chosen = (row for row in rows if row.attempt == before.attempt and isinstance(row, _CHOICES))
        worked_on = sum(each.spent.rows for each in read_heartbeats(Path(replaced.launch_folder)))
        resumed_from = [row.head_after for row in chosen][-1]
        total += rows_replayed(Ledger(lakehouse), rows, before, worked_on=worked_on, resumed_from=resumed_from)
        before = replaced
    return total


def _work_lost_s(rows: Sequence[LedgerRow], point: ResumePoint, failure: Failure) -> float:
    """Return the seconds of lost training: since the state that is kept of the failed attempt, or since it began."""
    if not failure.began:
        return 0.0
    row = checkpoint_rows(list(rows)).get(point.checkpoint_id or "")
    since = failure.began
    if isinstance(point, FromMemory) and point.memory_of == point.replaces:
        since = max(since, point.memory_at)
    elif row is not None and row.attempt == point.replaces:
        since = max(since, row.committed_at.timestamp())
    return max(0.0, failure.failed_at - since)


def write_given_up(lakehouse: Lakehouse, run: str, attempt: int, failure: Failure) -> None:
    """Write the row of a run that is given up: no attempt follows the one that failed last."""
    rows = Ledger(lakehouse).rows(run, kinds=HEAD_KINDS)
    claim = next(row for row in rows if isinstance(row, ClaimRow) and row.attempt == attempt)
    head = checkpoint_rows(rows).get(rows[-1].head_after or "")
    recovery = Recovery(
        run=run,
        seq=claim.seq,
        attempt=attempt,
        replaced_attempt=attempt,
        cause=failure.describe(),
        noticed_by=failure.noticed_by,
        failed_at=datetime.fromtimestamp(failure.failed_at, UTC),
        resumed_from=None if head is None else head.checkpoint_id,
        resumed_step=0 if head is None else head.step,
        rows_replayed=0,
        detect_s=failure.noticed_at - failure.failed_at,
        stop_s=failure.stopped_at - failure.launched_at,
        total_s=failure.stopped_at - failure.failed_at,
        outcome="gave up",
    )
    write_recovery(lakehouse, recovery)
