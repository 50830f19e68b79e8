"""Events about a run's branches and checkpoints, from its ledger.

In: a job spec and the name of an event. Out: typed events. The process of the listeners reads the ledger, so training does not
wait for it.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from dlac_pipeline.checkpoint.store import folder_uri
from dlac_pipeline.extensions.listeners import events
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.branches import FORGET_REASON, MoveBack, moves_back
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, claim_of, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    CheckpointRow,
    ForkRow,
    LedgerRow,
    QuarantinedCheckpointRow,
    RewindRow,
)
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.run_events import RETIRED, RUN_BEGUN, WENT_BACK, tables_of

COMMANDS = (WENT_BACK, RUN_BEGUN, RETIRED)
_log = logging.getLogger(__name__)


def read_events(
    spec: JobSpec, kind: str, *, attempts: Sequence[int] = (), checkpoints: Sequence[str] = ()
) -> Iterator[events.RunEvent]:
    """Yield the events of a kind: of `attempts` that moved the head back, or of retired `checkpoints`. Errors are only logged."""
    try:
        history = _History(connect(spec.lakehouse), spec.run)
        if kind == WENT_BACK:
            yield from history.moves(attempts)
        elif kind == RUN_BEGUN:
            yield history.beginning()
        else:
            yield history.retired(checkpoints)
    except DlacError as err:
        _log.warning("listeners do not receive the event %r of run %r: %s", kind, spec.run, err)


def read_shared_losses(spec: JobSpec, checkpoint_id: str | None) -> dict[int, float]:
    """Return step -> loss up to a checkpoint, on its lineage. Empty if the ledger cannot be read."""
    try:
        rows = Ledger(connect(spec.lakehouse)).head_rows(spec.run)
    except DlacError as err:
        _log.warning("the losses of run %r before this launch are unknown: %s", spec.run, err)
        return {}
    known = checkpoint_rows(rows)
    found: dict[int, float] = {}
    for row in (known[name] for name in reversed(lineage_of(rows, checkpoint_id))):
        found |= dict(enumerate(row.losses, row.step - len(row.losses) + 1))
    return found


class _History:
    """One read of a run's ledger rows."""

    def __init__(self, lakehouse: Lakehouse, run: str) -> None:
        self._run = run
        self._ledger, self._plans = Ledger(lakehouse), Plans(lakehouse)
        self._rows = self._ledger.head_rows(run)
        self._checkpoints = checkpoint_rows(self._rows)

    def moves(self, attempts: Sequence[int]) -> Iterator[events.WentBack]:
        """Yield an event for each move of the head by these attempts."""
        for move in moves_back(self._rows):
            if move.row.attempt in attempts:
                yield self._move(move)

    def beginning(self) -> events.RunBegun:
        """Return the event of a forked or adopted run."""
        first = min(self._checkpoints.values(), key=lambda row: row.seq)
        fork = next((row for row in self._rows if isinstance(row, ForkRow)), None)
        adopted = first.adopted or str(claim_of(self._rows, first.attempt).origin)
        parent = ForkRow() if fork is None else fork
        return events.RunBegun(
            **self._about(first),
            checkpoint=_checkpoint(first),
            parent_run=parent.parent_run,
            origin=adopted if fork is None else self._location_of(fork),
            origin_id=parent.parent_checkpoint,
            origin_step=parent.parent_step,
        )

    def retired(self, names: Iterable[str]) -> events.CheckpointsRetired:
        """Return the event of checkpoints that a command has retired."""
        found = tuple(_checkpoint(self._checkpoints[name]) for name in names)
        about = {**self._about(self._rows[-1]), "at": time.time()}
        return events.CheckpointsRetired(**about, checkpoints=found)

    def _about(self, row: LedgerRow) -> dict[str, Any]:
        at = row.committed_at.timestamp()
        return {"run": self._run, "attempt": row.attempt, "at": at, "ledger": self._ledger.table_uuid}

    def _location_of(self, fork: ForkRow) -> str:
        parents = checkpoint_rows(self._ledger.head_rows(fork.parent_run))
        return folder_uri(parents[fork.parent_checkpoint].manifest_uri)

    def _move(self, move: MoveBack) -> events.WentBack:
        row, head = move.row, move.row.head_after
        before, now = (lineage_of(self._rows, each) for each in (move.left, head))
        abandoned = [name for name in before if name not in set(now)]
        restored = [name for name in now if name not in set(before)]
        left, kept = (self._checkpoints.get(each or "") for each in (move.left, head))
        cause, reason = _cause_of(row)
        return events.WentBack(
            **self._about(row),
            cause=cause,
            reason=reason,
            branch=move.branch,
            step=0 if kept is None else kept.step,
            checkpoint_id=head,
            left_step=0 if left is None else left.step,
            abandoned=tuple(_checkpoint(self._checkpoints[name]) for name in abandoned),
            restored=tuple(_checkpoint(self._checkpoints[name]) for name in restored),
            attempts=tuple(self._attempts([*abandoned, *restored], now)),
        )

    def _attempts(self, changed: Sequence[str], lineage: Sequence[str]) -> Iterator[events.AttemptRows]:
        """Yield what the lineage has of each attempt of the changed checkpoints."""
        attempts = sorted({self._checkpoints[name].attempt for name in changed})
        kept = [name for name in lineage if self._checkpoints[name].attempt in attempts]
        counted = self._ledger.consumed_by(self._run, kept)
        for attempt in attempts:
            last = max((row for row in self._checkpoints.values() if row.attempt == attempt), key=lambda row: row.seq)
            tables = [
                events.InputTable(**each) for each in tables_of(leg_of(self._rows, last.checkpoint_id), self._plans)
            ]
            mine = [name for name in kept if self._checkpoints[name].attempt == attempt]
            rows = {each.name: sum(counted[name][source] for name in mine) for source, each in enumerate(tables)}
            yield events.AttemptRows(
                attempt=attempt,
                tables=tuple(tables),
                rows_by_table=rows,
                checkpoint=_checkpoint(self._checkpoints[mine[0]]) if mine else None,
            )


def _cause_of(row: RewindRow | QuarantinedCheckpointRow) -> tuple[Literal["rewind", "forget", "damaged"], str]:
    """Return the cause of a move of the head, and the reason as it was given."""
    if not isinstance(row, RewindRow):
        return "damaged", row.reason
    request = row.why.removeprefix(FORGET_REASON)
    return ("rewind", row.why) if request == row.why else ("forget", request)


def _checkpoint(row: CheckpointRow) -> events.Checkpoint:
    location = folder_uri(row.manifest_uri)
    return events.Checkpoint(checkpoint_id=row.checkpoint_id, step=row.step, attempt=row.attempt, location=location)
