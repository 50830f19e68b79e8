"""Rehearsal: a kept checkpoint is restored in a sandbox, and the steps after it are repeated and compared.

In: a run. Out: for each step the loss that production recorded and the loss of the rehearsal. Production is only read. A
rehearsal makes no claim, no ledger row, no file in the run's folders or in the store, and takes no lock that a live run
needs.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.restore.verified_copy import Restored, restore
from dlac_pipeline.checkpoint.store import Tiers, tiers_of
from dlac_pipeline.checkpoint.training_config import config_digest
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, NothingToRehearse, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows, out_of
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, LedgerRow
from dlac_pipeline.operations.rehearsal import Rehearsal, RehearsedStep
from dlac_pipeline.operations.replay import replay, spec_in_sandbox
from dlac_pipeline.operations.sandbox import sandbox
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.choose_leg import leg_of
from dlac_pipeline.supervise.claim import ResumePoint, new_nonce
from dlac_pipeline.supervise.claims import spec_of_attempt

MOST_STEPS = 20
"""Number of steps unless the caller requests more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """A kept checkpoint and its committed successor, among the run's rows."""

    rows: list[LedgerRow]
    checkpoint: CheckpointRow
    successor: CheckpointRow


def rehearse_run(
    lakehouse: Lakehouse,
    run: str,
    *,
    spec: JobSpec | None = None,
    steps: int | None = None,
    sandbox_folder: Path | None = None,
) -> Rehearsal:
    """Rehearse the newest kept checkpoint that has a committed successor, for up to `steps` steps (unset: at most 20).

    The job spec is that of the attempt that took the successor, unless `spec` is given. The order is that of the committed
    leg. The number of ranks is the recorded one, regardless of the spec. The sandbox is made in `sandbox_folder`, or in the
    folder of temporary files. It holds one copy of the checkpoint.

    Raises:
        NoSuchRun: the ledger has no row of the run.
        NoSuchJobSpec: the job spec of the attempt is not on this node.
        NothingToRehearse: no kept checkpoint has a committed successor. The message names what to keep.
        CheckpointDamaged: a file is missing, truncated or altered. The message names it.
        StoreUnavailable: the store does not answer.
        TrainingFailed, DlacError: the ranks failed with it.
    """
    with sandbox(sandbox_folder) as folder:
        started = time.monotonic()
        spec, chosen, restored = _restored(lakehouse, run, spec, folder)
        restored_at = time.monotonic()
        count = MOST_STEPS if steps is None else steps
        last = min(int(chosen.successor.step), restored.manifest.step + count)
        leg = leg_of(chosen.rows, chosen.successor.checkpoint_id)
        point = _resume_point(chosen, restored, leg, last)
        replayed = replay(spec_in_sandbox(spec, leg, chosen.successor, folder), folder, point)
        return Rehearsal(
            run=run,
            checkpoint_id=chosen.checkpoint.checkpoint_id,
            step=restored.manifest.step,
            successor=chosen.successor.checkpoint_id,
            attempt=chosen.successor.attempt,
            world_size=chosen.successor.world_size,
            script=spec.launch.script,
            config_changed=_changed(spec, restored.manifest.config_digest),
            steps=tuple(_compared(lakehouse, chosen, restored.manifest.step, last, replayed)),
            restore_s=restored_at - started,
            replay_s=time.monotonic() - restored_at,
        )


def _restored(
    lakehouse: Lakehouse, run: str, wanted: JobSpec | None, folder: Path
) -> tuple[JobSpec, _Chosen, Restored]:
    """Copy a checkpoint into the sandbox and return it. If the checkpoint was retired during the copy, take another one."""
    ledger = Ledger(lakehouse)
    while True:
        chosen = _newest_with_successor(ledger, run)
        spec = wanted or spec_of_attempt(lakehouse, chosen.rows, run, chosen.successor.attempt)
        tiers = Tiers(run=run, local=folder, store=spec.checkpoint.store, files=tiers_of(spec).files)
        try:
            return spec, chosen, restore(chosen.checkpoint, tiers)
        except (CheckpointDamaged, StoreUnavailable):  # the folder of a retired checkpoint may be removed
            if chosen.checkpoint.checkpoint_id not in out_of(ledger.head_rows(run)):
                raise


def _newest_with_successor(ledger: Ledger, run: str) -> _Chosen:
    rows = ledger.head_rows(run)
    checkpoints = checkpoint_rows(rows)
    out = out_of(rows)
    successor = checkpoints.get(fence_of_rows(rows).head or "")
    lineage = 0
    while successor is not None:
        lineage += 1
        parent = checkpoints.get(successor.parent or "")
        if parent is not None and parent.checkpoint_id not in out and successor.losses:
            return _Chosen(rows=rows, checkpoint=parent, successor=successor)
        successor = parent
    raise NothingToRehearse(
        f"expected a checkpoint of run {run!r} that is kept and has a committed successor with recorded losses, found none among "
        f"{lineage} on its lineage: keep two or more (checkpoint.keep_last = 2, or 0 for all), or tag one (`dlac tag {run} "
        "NAME --step N`) before the next is committed"
    )


def _resume_point(chosen: _Chosen, restored: Restored, leg: Leg, last: int) -> ResumePoint:
    before = leg_of(chosen.rows, chosen.checkpoint.checkpoint_id)
    point = ResumePoint(
        attempt=chosen.successor.attempt,
        nonce=new_nonce(),
        replaces=0,
        leg=leg.to_json(),
        leg_is_new=leg.index != before.index,
        rehearses_until=last,
    )
    return point.after(restored, chosen.checkpoint)


def _compared(
    lakehouse: Lakehouse, chosen: _Chosen, start: int, last: int, replayed: dict[str, Any]
) -> Iterator[RehearsedStep]:
    recorded = chosen.successor.losses
    skipped = _skipped_steps(lakehouse, chosen.successor)
    for index, step in enumerate(range(start + 1, last + 1)):
        yield RehearsedStep(
            step=step,
            recorded=_at(recorded, index),
            replayed=_at(replayed["losses"], index),
            recorded_skipped=step in skipped,
            replayed_skipped=step in replayed["skipped"],
        )


def _skipped_steps(lakehouse: Lakehouse, successor: CheckpointRow) -> set[int]:
    """Return the steps that production's engine did not apply."""
    if not successor.skipped_steps:
        return set()
    rows = Ledger(lakehouse).rows(successor.run, kinds=(AdvanceRow,))
    mine = [row for row in rows if row.checkpoint_id == successor.checkpoint_id and not row.applied]
    return {step for row in mine for step in range(row.first_step, row.last_step + 1)}


def _changed(spec: JobSpec, digest: str) -> bool | None:
    return None if not digest else config_digest(spec) != digest


def _at(losses: Sequence[float], index: int) -> float | None:
    return losses[index] if index < len(losses) else None
