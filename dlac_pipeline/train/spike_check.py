"""Loss spikes while a run trains, as `launch.on_spike` states. All ranks have the same losses, and so the same verdict."""

import json
from collections.abc import Callable, Collection

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.checkpoint.spikes import FACTOR, WINDOW, LossWindow, recorded_losses
from dlac_pipeline.checkpoint.step_sync import StepSync
from dlac_pipeline.lakehouse.errors import LossSpiked
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.train.open_attempt import OpenAttempt
from dlac_pipeline.train.sample_losses import SampleLoss, SampleLosses

_READ = 20 * WINDOW
"""Steps whose losses are read from the ledger. Some of them may be NaN, or of steps that were not applied."""


class SpikeCheck:
    """The check of one rank, and the losses of its samples as long as they may be needed."""

    def __init__(self, spec: JobSpec, attempt: OpenAttempt, tree: RankTree, warn: Callable[[str], None]) -> None:
        self._run, self._tree, self._warn = spec.run, tree, warn
        self._policy = None if attempt.rehearses else spec.launch.on_spike
        self._window = LossWindow(_losses_before(attempt, tree) if self._policy is not None else {})
        # A rehearsal keeps those of its last step.
        self.samples = SampleLosses(tree.rank, steps=int(attempt.rehearses))

    def check(self, sync: StepSync, *, skipped: Collection[int]) -> None:
        """Check the losses of a step message. Steps that were not applied do not count. Raise `LossSpiked` by policy."""
        for step, loss in enumerate(sync.losses, start=sync.step - len(sync.losses) + 1):
            if self._policy is None or step in skipped:
                continue
            if self._window.is_spike(loss):
                self._report(step, loss)
            self._window.add(loss)

    def gather(self, step: int) -> list[SampleLoss]:
        """Return the losses of the samples of a step at rank 0, else nothing. Collective."""
        parts = self._tree.gather(json.dumps(self.samples.of(step)).encode())
        return [tuple(sample) for part in parts or () for sample in json.loads(part)]

    def _report(self, step: int, loss: float) -> None:
        raise LossSpiked(
            f"expected a loss of run {self._run!r} of at most {self._window.limit:.6g} ({FACTOR:g} deviations above the median "
            f"{self._window.middle:.6g} of the steps before), found {loss:.6g} at step {step}; no checkpoint has the step, the "
            f"last committed one is kept: `dlac spike {self._run} --step {step}` ranks its rows and prints the rewind without "
            "the worst, then train again"
        )


def _losses_before(attempt: OpenAttempt, tree: RankTree) -> dict[int, float]:
    """Return the last losses before the resume point, by the ledger, which rank 0 reads. Collective."""
    losses: dict[int, float] = {}
    with failing_together(tree, doing="reading the losses of earlier steps"):
        if tree.rank == 0:
            ledger = Ledger(attempt.plans.lakehouse)
            rows = ledger.rows(attempt.name.run, kinds=(CheckpointRow,))
            losses = recorded_losses(ledger, rows, attempt.point.checkpoint_id, least=_READ)
    return dict(json.loads(tree.broadcast(json.dumps(list(losses.items())).encode() if tree.rank == 0 else None)))
