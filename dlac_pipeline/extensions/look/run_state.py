"""State of a run, from its ledger rows and the processes of this node, and the command to type next."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlac_pipeline.audit.wording import format_ago
from dlac_pipeline.cli.shared import SPEC_PLACEHOLDER
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger import run_rows
from dlac_pipeline.lakehouse.ledger.branches import exclusions_in_force
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_ledger
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, NODES, LedgerRow, Purpose
from dlac_pipeline.spec.bounds import LOST_AFTER_S
from dlac_pipeline.supervise import claims
from dlac_pipeline.supervise.liveness.launch_liveness import liveness_of
from dlac_pipeline.supervise.liveness.run_lock import lock_path
from dlac_pipeline.supervise.ranks.rank_events import read_ending, read_total_steps

_KEYS = ("run", "seq", "kind", "attempt", "nonce")
_COLUMNS = (*_KEYS, "step", "checkpoint_id", "parent", "head_after", "committed_at", "reason", "checkpoint", "claim")
_IDLE: dict[Purpose, str] = {"adopts": "adopted", "rewinds": "rewound", "forks": "forked"}
"""Purpose of an attempt that trains nothing -> the state of its run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """State of the last launch of a run, and the command that an operator types next."""

    state: str
    """State: finished, training, stopped, caught up, given up, dead, silent. Before a launch: rewound, adopted, forked."""
    note: str = ""
    command: tuple[str, ...] = ()
    """Arguments of `dlac`."""

    @property
    def next_command(self) -> str:
        """The command as a line for a shell."""
        return shlex.join(("dlac", *self.command)) if self.command else ""


def run_status(lakehouse: Lakehouse, run: str) -> dict[str, Any]:
    """Return the facts about a run by name. Raise `NoSuchRun`, or `LedgerOlderThanStore` after an old backup was restored."""
    from dlac_pipeline.extensions.look.goodput import (
        goodput_of_rows,  # it imports DuckDB, which other looks at a run do not need
    )

    ledger = Ledger(lakehouse)
    # The same rows twice, because the files of the first read are kept.
    check_ledger(lakehouse, run, rows=ledger.rows(run, kinds=HEAD_KINDS))
    rows = ledger.head_rows(run)
    recoveries = recoveries_of(lakehouse, run)
    fence, finished = run_rows.fence_of_rows(rows), run_rows.finished_of_rows(rows)
    standing = standing_of(rows, recoveries)
    head = run_rows.checkpoint_rows(rows).get(fence.head or "")
    given_up = [each.cause for each in recoveries if each.outcome == "gave up" and each.attempt == fence.attempt]
    losses = () if head is None else head.losses
    return {
        "run": run,
        "state": "finished" if finished else "open",
        "step": 0 if head is None else head.step,
        "loss": losses[-1] if losses else None,
        "head_checkpoint": fence.head,
        "head_age_s": None if head is None else round((datetime.now(UTC) - head.committed_at).total_seconds(), 1),
        "checkpoint_reason": None if head is None else head.reason,
        "checkpoint_interval_s": None if head is None or head.interval_s is None else round(head.interval_s, 1),
        "checkpoint_interval_why": None if head is None else head.why,
        "checkpoints": len(run_rows.checkpoint_rows(rows)),
        "attempt": fence.attempt,
        "attempts_without_progress": 0 if finished else claims.attempts_without_progress(rows),
        "excluded_by_rewinds": [each.where for each in exclusions_in_force(rows)],
        "recoveries": sum(each.outcome == "resumed" for each in recoveries),
        "goodput": goodput_of_rows(rows, recoveries),
        "gave_up": given_up[-1] if given_up and not finished else None,
        "last_failure": current_failure(rows, recoveries),
        "total_steps": total_steps_of(rows),
        "launch": standing.state,
        "launch_note": standing.note,
        "next_command": standing.next_command,
    }


def current_failure(rows: list[LedgerRow], recoveries: Sequence[Recovery]) -> str | None:
    """Return the cause of the last failure, unless a later attempt has committed a checkpoint or the run is finished."""
    ended = [each for each in recoveries if each.outcome != "rejoined"]  # the attempt of the others went on
    last = max(ended, key=lambda each: each.failed_at, default=None)
    if last is None or run_rows.finished_of_rows(rows):
        return None
    failed = last.attempt if last.outcome == "gave up" else last.replaced_attempt
    later = any(each.attempt > failed for each in run_rows.checkpoint_rows(rows).values())
    return None if later else last.cause


def list_runs(lakehouse: Lakehouse) -> list[dict[str, Any]]:
    """Return the facts about every run of the ledger. The run with the newest row is first."""
    by_run = Ledger(lakehouse).rows_of_runs(HEAD_KINDS, columns=_COLUMNS)
    recoveries: dict[str, list[Recovery]] = defaultdict(list)
    for each in recoveries_of(lakehouse):
        recoveries[each.run].append(each)
    found = []
    for run, rows in sorted(by_run.items(), key=lambda item: item[1][-1].committed_at, reverse=True):
        fence, standing = run_rows.fence_of_rows(rows), standing_of(rows, recoveries[run])
        head = run_rows.checkpoint_rows(rows).get(fence.head or "")
        facts = {
            "run": run,
            "state": "finished" if standing.state == "finished" else "open",
            "launch": standing.state,
            "step": 0 if head is None else head.step,
            "total_steps": total_steps_of(rows),
            "head_checkpoint": fence.head,
            "head_committed_at": None if head is None else head.committed_at,
            "attempts": fence.attempt,
            "next_command": standing.next_command,
        }
        found.append(facts)
    return found


def standing_of(rows: list[LedgerRow], recoveries: Sequence[Recovery] = ()) -> Standing:
    """Return the state of the last launch of a run, from its rows, its recoveries and the processes of this node.

    For a launch on this node the lock decides: a living process holds it, or none. On another node only its writes are known.
    """
    if not rows:
        return Standing(state="unknown")
    run, attempt = rows[0].run, run_rows.fence_of_rows(rows).attempt
    if run_rows.finished_of_rows(rows):
        return Standing(state="finished", command=("audit", run))
    begun = _idle_kind(rows, attempt)
    if begun is not None:
        return Standing(state=begun, note="not launched since", command=_resume(rows, run))
    return _standing_of_launch(rows, run, attempt, recoveries)


def _standing_of_launch(rows: list[LedgerRow], run: str, attempt: int, recoveries: Sequence[Recovery]) -> Standing:
    signs = liveness_of(rows, attempt)
    ago = f"last heartbeat {format_ago(signs.silent_s)}"
    if signs.here and signs.lock_held:
        holder = lock_path(signs.local, run).read_text() or "(starting)"
        note = f"attempt {attempt}, process {holder} on this node"
        return Standing(state="training", note=note, command=("status", run, "--watch"))
    ended = _ended_in_order(rows, attempt)
    if ended == "caught up":
        note = f"`{shlex.join(('dlac', *_resume(rows, run)))}` trains rows that are appended later"
        return Standing(state=ended, note=note, command=("audit", run))
    if ended is not None:
        return Standing(state=ended, command=_resume(rows, run))
    if not signs.here and signs.silent_s < LOST_AFTER_S:
        note = f"attempt {attempt} on node {signs.host}, {ago}"
        return Standing(state="training", note=note, command=("status", run, "--watch"))
    given_up = [each.cause for each in recoveries if (each.attempt, each.outcome) == (attempt, "gave up")]
    if given_up:
        return Standing(state="given up", note=given_up[-1].partition("\n")[0], command=("incidents", run))
    # It ended without a request: its process is gone, or it was silent for too long.
    note = f"attempt {attempt} has no process on this node any more, {ago}"
    if not signs.here:
        note = f"attempt {attempt} on node {signs.host or '(not recorded)'}, {ago}"
    launched_by = claims.launcher_of(rows, attempt)
    if launched_by:
        note += f"; the sensor of Dagster run {launched_by} recovers it"
    return Standing(state="dead" if signs.here else "silent", note=note, command=_resume(rows, run))


def _ended_in_order(rows: list[LedgerRow], attempt: int) -> str | None:
    """Return the end of an attempt that reported it or took its last checkpoint to exit, or None for another attempt."""
    folder = run_rows.claim_of(rows, attempt).launch_folder
    ending = read_ending(Path(folder)) if folder else None
    reason = claims.last_reason(rows, attempt)
    if ending == "caught_up" or (claims.left_in_order(rows, attempt) and reason == "end"):
        return "caught up"
    stopped = ending is not None or (claims.left_in_order(rows, attempt) and reason != NODES)
    return "stopped" if stopped else None


def _resume(rows: list[LedgerRow], run: str) -> tuple[str, ...]:
    """Return the command that resumes a run. It names a job spec if the one of the last launch is not on this node."""
    folder = run_rows.claim_of(rows, max(claims.trained_attempts(rows), default=0)).launch_folder
    known = bool(folder) and (Path(folder) / "spec.json").is_file()
    return ("recover", run) if known else ("recover", run, "--spec", SPEC_PLACEHOLDER)


def total_steps_of(rows: list[LedgerRow]) -> int | None:
    """Return the last step of the run, as the last attempt recorded it at its start or with its head, or None."""
    fence = run_rows.fence_of_rows(rows)
    head = run_rows.checkpoint_rows(rows).get(fence.head or "")
    if run_rows.finished_of_rows(rows):
        return None if head is None else head.step
    if head is not None and head.attempt == fence.attempt:  # replays of skipped steps have come since the start
        return head.total_steps
    folder = run_rows.claim_of(rows, fence.attempt).launch_folder
    announced = read_total_steps(Path(folder)) if folder else None
    return announced if announced is not None or head is None else head.total_steps


def _idle_kind(rows: Sequence[LedgerRow], attempt: int) -> str | None:
    """Return the state of a run whose attempt trains nothing (adopted, rewound or forked), or None for one that trains."""
    purpose = run_rows.claim_of(rows, attempt).purpose
    return None if purpose is None else _IDLE[purpose]
