"""Rows of `recoveries` as one run has them: a failure with the phases of its recovery, replaced ranks, and a run given up."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, claim_of, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, ClaimRow, LedgerRow, QuarantinedCheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claims import left_in_order
from dlac_pipeline.supervise.failure import Failure
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, read_heartbeats
from dlac_pipeline.supervise.ranks.local_ranks import Rejoined
from dlac_pipeline.supervise.ranks.rank_events import Event

_CHOICES = (ClaimRow, QuarantinedCheckpointRow)
"""Rows that say after which checkpoint an attempt resumes."""
RecoveryOutcome = Literal["resumed", "failed again", "gave up"]


class Incident:
    """A recovery in progress: `observe` the ranks until their first step is done, then `build_recovery`."""

    def __init__(self, run: str, point: ResumePoint, failure: Failure) -> None:
        self._run = run
        self._point = point
        self._failure = failure
        self._resumable_at = time.time()
        self._loaded_at: float | None = None
        self._stepped_at: float | None = None
        self._convert_s = 0.0

    def observe(self, heartbeats: Sequence[RankHeartbeat]) -> bool:
        """Note the phases that the ranks have reached. Return True once all have finished a step, or all that there is."""
        now = time.time()
        past_loading = all(found.phase >= Phase.TRAINING for found in heartbeats)
        self._convert_s = max(found.spent.convert_us for found in heartbeats) / 1e6
        if self._loaded_at is None and past_loading:
            self._loaded_at = now
        nothing_to_do = (Phase.DONE, Phase.IDLE)
        stepped = all(found.step > self._point.step or found.phase in nothing_to_do for found in heartbeats)
        if past_loading and stepped:
            self._stepped_at = now
        return self._stepped_at is not None

    def build_recovery(self, outcome: RecoveryOutcome, ended_at: float, lakehouse: Lakehouse) -> Recovery:
        """Return the row of `recoveries`, with what the ledger knows of it. `ended_at` is its end if no step was done."""
        point, failure = self._point, self._failure
        ended = self._stepped_at or ended_at
        loaded = self._loaded_at or ended
        ledger = Ledger(lakehouse)
        rows = ledger.rows(self._run, kinds=HEAD_KINDS)
        claim = next(row for row in rows if isinstance(row, ClaimRow) and row.nonce == point.nonce)
        replayed = rows_replayed(ledger, rows, claim, worked_on=failure.rows, resumed_from=point.checkpoint_id)
        return Recovery(
            run=self._run,
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


def build_given_up(run: str, failure: Failure, attempt: int, lakehouse: Lakehouse) -> Recovery:
    """Return the row of a run that is given up: no attempt follows the one that failed last."""
    rows = Ledger(lakehouse).rows(run, kinds=HEAD_KINDS)
    claim = next(row for row in rows if isinstance(row, ClaimRow) and row.attempt == attempt)
    head = checkpoint_rows(rows).get(rows[-1].head_after or "")
    return Recovery(
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


def build_rejoined(rejoined: Rejoined, spec: JobSpec, nonce: str, lakehouse: Lakehouse) -> Recovery:
    """Return the row of replaced ranks that take part again in the attempt of `nonce`."""
    heartbeat = rejoined.heartbeat
    rows = Ledger(lakehouse).rows(spec.run, kinds=(ClaimRow,))
    claim = next(row for row in rows if isinstance(row, ClaimRow) and row.nonce == nonce)
    started = heartbeat.spent.began
    return Recovery(
        run=spec.run,
        seq=claim.seq,
        attempt=claim.attempt,
        replaced_attempt=claim.attempt,
        cause=rejoined.cause,
        noticed_by=rejoined.noticed_by,
        failed_at=datetime.fromtimestamp(rejoined.failed_at, UTC),
        resumed_from=None,
        resumed_step=heartbeat.step,
        rows_replayed=spec.order.batch_size if rejoined.had_batch else 0,
        detect_s=rejoined.noticed_at - rejoined.failed_at,
        load_s=started - rejoined.noticed_at,
        first_step_s=heartbeat.at - started,
        total_s=heartbeat.at - rejoined.failed_at,
        outcome="rejoined",
    )
