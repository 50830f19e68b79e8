"""Watch of the losses of a run: of its steps as they are known, and of the samples of a batch. An extension brings it."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.step_sync import StepSync
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.train.open_attempt import OpenAttempt

LOSS_WATCHES = Door("dlac.loss_watches", "loss watch")
_OF_SPIKES = "spikes"
"""The watch for `launch.on_spike`."""


class LossWatch(Protocol):
    """The watch of one rank over its losses in an attempt. Its methods are collective, except `watch`."""

    def watch(self, batch: Batch) -> Batch:
        """Return a batch of the reader for the script. Its `on_mean` may receive the losses of its samples."""

    def check(self, sync: StepSync, *, skipped: Collection[int]) -> None:
        """Check the losses of steps, which all ranks receive. Steps in `skipped` were not applied.

        Raise a `DlacError` to end the attempt. One whose `detail` names a row policy and samples is followed by another
        attempt.
        """

    def gather(self, step: int) -> list[Any]:
        """Return the losses of the samples of the last step, by slot of the global batch, at rank 0."""


def open_watch(spec: JobSpec, attempt: OpenAttempt, tree: RankTree, warn: Callable[[str], None]) -> LossWatch | None:
    """Return the watch that `launch.on_spike` or a rehearsal asks for. None: no losses are watched. Collective."""
    if spec.launch.on_spike is None and not attempt.rehearses:
        return None
    found: LossWatch = LOSS_WATCHES.load(_OF_SPIKES, setting="launch.on_spike")(spec, attempt, tree, warn)
    return found
