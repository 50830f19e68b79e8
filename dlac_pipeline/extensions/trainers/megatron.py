"""Megatron-core, without importing it: the micro-batches of a run as the data iterator of its schedules.

See docs/extensions/trainers.md.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.train.training_run import TrainingRun


class RunIterator:
    """Iterator of the micro-batches of one step, and after `step_done` of the next one. Each chunk of a model takes this one.

    Every rank makes it after `run.restore`. A rank may leave micro-batches: of a stage in the middle, or one that gets its values
    from another rank of tensor parallelism.
    """

    def __init__(self, run: TrainingRun, inputs: Callable[[Batch], Any], *, micro_batch_size: int) -> None:
        """`inputs` makes the arguments of the forward step of a micro-batch.

        Raise `SpecInvalid` if the size does not divide the samples of a rank's batch.
        """
        samples = run.spec.order.batch_size // run.coordinate.count
        if samples % micro_batch_size:
            raise SpecInvalid(
                f"expected a micro-batch size that divides the {samples} samples of a rank's batch, found {micro_batch_size}: "
                "change it, or order.batch_size"
            )
        self.num_microbatches = samples // micro_batch_size
        """The argument of this name of Megatron's schedules."""
        self._run, self._inputs = run, inputs
        self._parts: Iterator[Batch] = iter(run.loader(micro_batches=self.num_microbatches))
        self._ready: deque[Batch] = deque()
        self.is_over = False
        """True if no step is left: the run is over, or was asked to stop."""
        self._take()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next micro-batch of this step."""
        if not self._ready:
            raise StopIteration
        return self._inputs(self._ready.popleft())

    def step_done(self, loss: torch.Tensor | float | None, *, applied: bool | None = None) -> None:
        """Record the step, as `run.step_done` does, and take the batch of the next one. Collective."""
        for part in self._ready:
            part.on_weight()  # other ranks have used it
        self._run.step_done(loss, applied=applied)
        self._take()

    def _take(self) -> None:
        self._ready = deque(islice(self._parts, self.num_microbatches))
        self.is_over = not self._ready
