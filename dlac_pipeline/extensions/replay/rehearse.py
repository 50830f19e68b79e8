"""Rehearsal: a kept checkpoint is restored in a sandbox, and the losses of the steps after it are compared (`step_replay`)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.manifest import config_digest
from dlac_pipeline.extensions.replay.replay import bits_of
from dlac_pipeline.extensions.replay.step_replay import Replay, ReplayStart, replay_steps
from dlac_pipeline.lakehouse.errors import NothingToRehearse
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows, out_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.spec.job_spec import JobSpec

MOST_STEPS = 20
"""Number of steps unless the caller requests more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedStep:
    """A step: its record in production, and its result in the rehearsal."""

    step: int
    recorded: float | None
    """Global loss, or None if the ledger has none."""
    replayed: float | None
    """Global loss of the rehearsal, or None if the script ended before the step."""
    recorded_skipped: bool = False
    """True if the engine did not apply the step in production."""
    replayed_skipped: bool = False

    @property
    def compared(self) -> bool:
        """True if a recorded loss exists for comparison."""
        return self.recorded is not None

    @property
    def identical(self) -> bool:
        """True if both losses are equal, bit for bit, and the step was applied in both or in neither."""
        return (bits_of(self.recorded), self.recorded_skipped) == (bits_of(self.replayed), self.replayed_skipped)

    @property
    def difference(self) -> float | None:
        """Replayed loss minus the recorded one, or None if either is missing."""
        return None if self.recorded is None or self.replayed is None else self.replayed - self.recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Result of a rehearsal."""

    run: str
    checkpoint_id: str
    """The checkpoint that was restored."""
    step: int
    successor: str
    """The committed checkpoint whose losses were compared."""
    attempt: int
    """The production attempt that took those steps."""
    world_size: int
    script: str
    config_changed: bool | None
    """True if spec, script or arguments differ from the checkpoint's. None if it names none."""
    steps: tuple[RehearsedStep, ...]
    restore_s: float
    """Seconds to copy the checkpoint into the sandbox and to verify it."""
    replay_s: float

    @property
    def compared(self) -> int:
        """Steps that have a recorded loss."""
        return sum(step.compared for step in self.steps)

    @property
    def differing(self) -> tuple[RehearsedStep, ...]:
        """The compared steps whose losses differ, in order."""
        return tuple(step for step in self.steps if step.compared and not step.identical)

    @property
    def identical(self) -> bool:
        """True if steps were compared, and all of them are identical."""
        return self.compared > 0 and not self.differing

    def to_json(self) -> dict[str, Any]:
        """Return this rehearsal as plain data, with its verdict."""
        differing = [{"step": step.step, "difference": step.difference} for step in self.differing]
        return {**asdict(self), "identical": self.identical, "compared": self.compared, "differing": differing}

    def summary(self) -> str:
        """Return the verdict as one sentence."""
        steps = f"steps {self.step + 1} to {self.steps[-1].step} after checkpoint {self.checkpoint_id!r}"
        if self.identical:
            return f"{steps} on {self.world_size} ranks: {self.compared} losses bit-identical"
        first = self.differing[0]
        found = "no loss: the script ended before" if first.replayed is None else f"{first.replayed!r}"
        by = "" if first.difference is None else f", {first.difference:+.3e} away"
        skipped = " (applied in one of them only)" if first.recorded_skipped != first.replayed_skipped else ""
        changed = "; spec, script or arguments are not those of the checkpoint" if self.config_changed else ""
        return (
            f"{steps} on {self.world_size} ranks: {len(self.differing)} of {self.compared} losses differ, first in step "
            f"{first.step}: expected {first.recorded!r}, found {found}{by}{skipped}{changed}"
        )


def rehearse_run(
    lakehouse: Lakehouse,
    run: str,
    *,
    spec: JobSpec | None = None,
    steps: int | None = None,
    sandbox_folder: Path | None = None,
) -> Rehearsal:
    """Rehearse the newest kept checkpoint that has a committed successor, for up to `steps` steps (unset: at most 20).

    The job spec comes from the attempt that took the successor, unless `spec` is given. The order comes from the committed
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
    count = MOST_STEPS if steps is None else steps
    choose = partial(newest_with_successor, Ledger(lakehouse), run, count)
    done = replay_steps(lakehouse, run, choose, spec=spec, folder=sandbox_folder)
    assert done.restored is not None, "it begins with a checkpoint"
    digest, start = done.restored.manifest.config_digest, done.start
    return Rehearsal(
        run=run,
        checkpoint_id=done.restored.manifest.checkpoint_id,
        step=start.step,
        successor=start.successor.checkpoint_id,
        attempt=start.successor.attempt,
        world_size=start.successor.world_size,
        script=done.spec.launch.script,
        config_changed=config_digest(done.spec) != digest if digest else None,
        steps=tuple(_compared(lakehouse, done)),
        restore_s=done.restore_s,
        replay_s=done.replay_s,
    )


def is_of_one_mesh(rows: Sequence[LedgerRow], parent: CheckpointRow, successor: CheckpointRow) -> bool:
    """Return whether the same ranks, shares and stages trained the steps of a checkpoint, also before a resume from memory."""
    claims = [row for row in rows if isinstance(row, ClaimRow) and parent.seq < row.seq < successor.seq]
    found = {
        (row.memory_ranks, row.memory_readers or row.memory_ranks, row.memory_stages or 1)
        for row in claims
        if row.memory_step > parent.step
    }
    return found <= {(successor.world_size, successor.readers or successor.world_size, successor.stages or 1)}


def newest_with_successor(ledger: Ledger, run: str, count: int) -> ReplayStart:
    """Return the newest checkpoint whose committed successor one mesh of ranks trained."""
    rows = ledger.head_rows(run)
    checkpoints = checkpoint_rows(rows)
    out = out_of(rows)
    successor = checkpoints.get(fence_of_rows(rows).head or "")
    lineage = 0
    while successor is not None:
        lineage += 1
        parent = checkpoints.get(successor.parent or "")
        if (
            parent is not None
            and parent.checkpoint_id not in out
            and successor.losses
            and is_of_one_mesh(rows, parent, successor)
        ):
            last, leg = min(successor.step, parent.step + count), leg_of(rows, successor.checkpoint_id)
            return ReplayStart(rows=rows, checkpoint=parent, successor=successor, leg=leg, last=last)
        successor = parent
    raise NothingToRehearse(
        f"expected a checkpoint of run {run!r} that is kept and has a committed successor with recorded losses, found none among "
        f"{lineage} on its lineage: keep two or more (checkpoint.keep_last = 2, or 0 for all), or tag one (`dlac checkpoint "
        f"tag {run} NAME --step N`) before the next is committed"
    )


def _compared(lakehouse: Lakehouse, done: Replay) -> Iterator[RehearsedStep]:
    start = done.start
    recorded = dict(enumerate(start.successor.losses, start.step + 1))
    skipped = Ledger(lakehouse).skipped_steps([start.successor])
    for step in range(start.step + 1, start.last + 1):
        before, now = recorded.get(step), done.losses.get(step)
        skips = {"recorded_skipped": step in skipped, "replayed_skipped": step in done.skipped}
        yield RehearsedStep(step=step, recorded=before, replayed=now, **skips)
