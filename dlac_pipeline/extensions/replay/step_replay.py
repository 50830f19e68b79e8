"""Replay of steps of a run: a kept checkpoint is restored in a sandbox, and real ranks repeat the steps after it.

Production is only read: no claim, no ledger row, no file of the run, no lock that a live run needs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.restore.resume_point import FreshStart, FromCheckpoint, ResumePoint
from dlac_pipeline.checkpoint.restore.verified_copy import Restored, restore
from dlac_pipeline.checkpoint.store import Tiers, tiers_of
from dlac_pipeline.extensions.replay.replay import replay, sandbox, spec_in_sandbox
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import new_nonce
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import out_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, LedgerRow
from dlac_pipeline.plan.legs.committed_leg import leg_of, skipped_in
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claims import spec_of_attempt
from dlac_pipeline.supervise.start.resume_points import checkpoint_facts


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStart:
    """A kept checkpoint, and the steps after it to repeat."""

    rows: list[LedgerRow]
    checkpoint: CheckpointRow | None
    """None: the beginning of the run."""
    successor: CheckpointRow
    """A later checkpoint, whose attempt and number of ranks trained these steps."""
    leg: Leg
    last: int
    """The last step to repeat."""

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def resume_point(self, restored: Restored | None) -> ResumePoint:
        """Return the resume point of the ranks."""
        before = None if self.checkpoint is None else leg_of(self.rows, self.checkpoint.checkpoint_id)
        facts: dict[str, Any] = {
            "attempt": self.successor.attempt,
            "nonce": new_nonce(),
            "leg": self.leg.to_json(),
            "leg_is_new": before is None or self.leg.index != before.index,
            "rehearses_until": self.last,
        }
        if restored is None or self.checkpoint is None:
            return FreshStart(**facts)
        return FromCheckpoint(**facts, **checkpoint_facts(restored, self.checkpoint))


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The repeated steps."""

    spec: JobSpec
    start: ReplayStart
    restored: Restored | None
    losses: dict[int, float]
    """Step -> global loss. Empty if the script ended before the last step."""
    skipped: Sequence[int]
    """Steps that the engine did not apply."""
    samples: Sequence[Sequence[tuple[float, int]]]
    """Loss and items of each sample of the last step, or of each of its documents, by slot."""
    restore_s: float
    replay_s: float


def replay_steps(
    lakehouse: Lakehouse, run: str, choose: Callable[[], ReplayStart], *, spec: JobSpec | None, folder: Path | None
) -> Replay:
    """Restore the checkpoint that `choose` finds, and repeat the steps after it, in a sandbox below `folder`.

    The job spec comes from the attempt that trained the steps, unless `spec` is given. Order and number of ranks are the
    recorded ones.

    Raises:
        NoSuchJobSpec: the job spec of the attempt is not on this node.
        CheckpointDamaged: a file is missing, truncated or altered. The message names it.
        StoreUnavailable: the store does not answer.
        TrainingFailed, DlacError: the ranks failed with it.
    """
    with sandbox(folder) as place:
        started = time.monotonic()
        known, start, restored = restore_start(lakehouse, run, choose, spec, place)
        restored_at = time.monotonic()
        head = None if start.checkpoint is None else start.checkpoint.checkpoint_id
        skipped = skipped_in(start.leg, Ledger(lakehouse), start.rows, head)
        point = replace(start.resume_point(restored), skipped=skipped)
        found = replay(spec_in_sandbox(known, start.leg, start.successor, place), place, point)
        return Replay(
            spec=known,
            start=start,
            restored=restored,
            losses=dict(enumerate(found["losses"], start.step + 1)),
            skipped=found["skipped"],
            samples=found["samples"],
            restore_s=restored_at - started,
            replay_s=time.monotonic() - restored_at,
        )


def restore_start(
    lakehouse: Lakehouse, run: str, choose: Callable[[], ReplayStart], wanted: JobSpec | None, folder: Path
) -> tuple[JobSpec, ReplayStart, Restored | None]:
    """Copy a checkpoint into the sandbox and return it. If the checkpoint was retired during the copy, take another one."""
    while True:
        start = choose()
        spec = wanted or spec_of_attempt(lakehouse, start.rows, run, start.successor.attempt)
        if start.checkpoint is None:
            return spec, start, None
        tiers = Tiers(run=run, local=folder, store=spec.checkpoint.store, files=tiers_of(spec).files)
        try:
            return spec, start, restore(start.checkpoint, tiers)
        except (CheckpointDamaged, StoreUnavailable):  # the folder of a retired checkpoint may be removed
            if start.checkpoint.checkpoint_id not in out_of(Ledger(lakehouse).head_rows(run)):
                raise
