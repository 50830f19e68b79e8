"""Reader State Tracker: what each finished optimizer step consumed, since the last committed checkpoint.

It advances when an optimizer step is done, never when a batch is handed out: prefetched rows are not consumed. Per step it
keeps a reference and a flag; the rows of the ledger are worked out from the order when a checkpoint is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from catalog.errors import CursorMismatch
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.batch import Batch


@dataclass(slots=True)
class ReaderStateTracker:
    """One rank's record of finished steps; `committed_step` is the step of the last committed checkpoint."""

    committed_step: int
    groups: range
    """Key groups whose cursors this rank reports."""
    step: int = 0
    cursors: Ints | None = None
    """Cursors after `step`, int64 [groups, 3]; None before the first step of an attempt."""
    losses: list[float] = field(default_factory=list)
    """Global loss of each step since the last committed checkpoint, filled as they become known."""
    skipped: list[int] = field(default_factory=list)
    """Steps since then that the engine did not apply."""

    def __post_init__(self) -> None:
        self.step = self.committed_step

    def step_done(self, batch: Batch, *, applied: bool) -> None:
        """Record that the optimizer step of `batch` is done.

        Raises:
            CursorMismatch: a step was left out or recorded twice.
        """
        if batch.step != self.step + 1:
            raise CursorMismatch(
                f"expected step_done for step {self.step + 1}, found step {batch.step}: call it once per batch, in order"
            )
        self.step = batch.step
        self.cursors = batch.cursors
        if not applied:
            self.skipped.append(batch.step)

    def stretches(self) -> Iterator[tuple[int, int, bool]]:
        """(first step, last step, applied) of each run of steps alike, since the last committed checkpoint."""
        start = self.committed_step + 1
        for skipped in [*self.skipped, self.step + 1]:
            if start < skipped:
                yield start, skipped - 1, True
            if skipped <= self.step:
                yield skipped, skipped, False
            start = skipped + 1

    def committed(self) -> None:
        """Forget what the checkpoint at `step` has recorded."""
        self.committed_step = self.step
        self.losses.clear()
        self.skipped.clear()
