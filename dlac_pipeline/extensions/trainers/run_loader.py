"""Loader of a training run for a trainer that has the loop: batches of the run, in the trainer's form and in its parts.

A trainer averages the mean losses of micro-batches and of ranks. If the batch of a step is not full, its micro-batches differ in
their samples, and their losses need weights. So the loader keeps a weight for each micro-batch until its loss has it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dlac_pipeline.lakehouse.errors import ResumeMismatch, ScriptInvalid, SpecInvalid
from dlac_pipeline.read.batch import Batch, drop_empty_slots, place_losses, take_slots

if TYPE_CHECKING:
    from dlac_pipeline.train.training_run import TrainingRun


@dataclass(slots=True)
class _Given:
    """A micro-batch that the trainer has, and whether its loss has its weight."""

    weight: float
    weighed: bool = False

    def note(self) -> None:
        """Note that the script has asked for the weight, or for a mean that has it."""
        self.weighed = True


class RunLoader:
    """Batches of a training run, cut into micro-batches of their samples. Made by `TrainingRun.loader`.

    Its position is the ledger's. `state_dict` names it, for trainers that keep the state of a loader in their
    checkpoint. `load_state_dict` checks that the trainer has loaded the checkpoint from which the run resumes.
    """

    def __init__(
        self, run: "TrainingRun", inputs: Callable[[Batch], Any] | None, *, micro_batches: int, device: Any
    ) -> None:
        if run.spec.launch.on_skipped == "replay":
            raise SpecInvalid(
                'expected launch.on_skipped = "count" with a trainer that has the loop, whose number of steps is fixed, found '
                '"replay": set it to "count", or train with run.batches()'
            )
        samples = run.spec.order.batch_size // run.coordinate.count
        if micro_batches < 1 or samples % micro_batches:
            raise SpecInvalid(
                f"expected a number of micro-batches that divides the {samples} samples of a rank's batch, found "
                f"{micro_batches}: change the trainer's gradient accumulation, or order.batch_size"
            )
        self.dataset = self
        """The loader itself: trainers look for the dataset of a loader, to count its samples."""
        self.batch_size = samples // micro_batches
        """Samples of a micro-batch."""
        self._run, self._inputs, self._device = run, inputs, device
        self._micro_batches = micro_batches
        self._given: deque[_Given] = deque()
        """The micro-batches of this step whose weight no trainer has taken."""

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run, trained ones included. Raises TypeError if it is unknown."""
        steps = self._run.total_steps
        if steps is None:
            raise TypeError("the number of batches of a streamed run is unknown until it is read")
        return steps * self._micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining micro-batches. Before the first one the random generators are set as in the checkpoint."""
        for batch in self._run.batches(device=self._device):
            self._given.clear()  # a stage without a loss has asked for no weight
            full = batch.rows == self._run.spec.order.batch_size
            for part, weight in cut(batch, self._micro_batches, full=full):
                self._run.reset_generators()
                given = _Given(weight)
                self._given.append(given)
                noted = replace(part, on_weight=given.note)
                yield noted if self._inputs is None else self._inputs(noted)

    def next_weight(self) -> float:
        """Return the factor for the loss of the oldest micro-batch without one, if that is a mean over samples.

        It is 1 if `inputs` or the model have used `batch.weight` or `batch.mean` already.
        """
        given = self._given.popleft()
        return 1.0 if given.weighed else given.weight

    def check_weights(self, *, always_full: bool) -> None:
        """Raise `ScriptInvalid` if a loss of this step has no weight but needs one, or will at the end of the run."""
        left = [given.weight for given in self._given if not given.weighed]
        self._given.clear()
        if left and (not always_full or any(weight != 1 for weight in left)):
            raise ScriptInvalid(
                "expected a loss that counts each sample once also in a batch with fewer samples than order.batch_size, as "
                f"run {self._run.spec.run!r} may have, found the loss of a micro-batch without its weight: compute it by "
                "batch.mean(loss_per_sample), multiply the mean by batch.weight, or let order.batch_size divide the rows"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position: run, leg, plans, and the last finished step."""
        return {"format_version": 1, **self._run.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a state is the position from which the run resumes. Raise `ResumeMismatch` with what differs."""
        expected = self.state_dict()
        differing = sorted(name for name, value in expected.items() if state.get(name) != value)
        if differing:
            raise ResumeMismatch(
                f"expected the loader's state { ({name: expected[name] for name in differing})!r}, as the ledger has it, found "
                f"{ ({name: state.get(name) for name in differing})!r}: let the trainer load the checkpoint that the run resumes "
                "from"
            )


def cut(batch: Batch, parts: int, *, full: bool) -> Iterator[tuple[Batch, float]]:
    """Yield the samples of a batch in micro-batches that differ by at most one sample, and the weights of these.

    A rank with fewer samples than `parts` fills up with micro-batches of one invalid slot, because all ranks have equally many
    steps of their collectives. `full` is true if no slot of the global batch is empty. A batch without values has no slots.
    """
    if not batch.tensors:
        yield from [(replace(batch, micro_batches=parts), 0.0)] * parts
        return
    kept = batch if full else drop_empty_slots(batch)
    samples = len(kept.valid)
    slots = torch.arange(samples) if full else batch.valid.nonzero().flatten()
    for part in range(parts):
        low, high = samples * part // parts, samples * (part + 1) // parts
        found = take_slots(kept, low, high) if low < high else _invalid(kept if samples else batch)
        mine, weight = slots[low:high], (high - low) * batch.readers * parts / batch.rows
        yield replace(found, micro_batches=parts, on_mean=place_losses(batch, mine)), weight


def weigh(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a mean loss times the weight of its micro-batch: 0, if that is 0, also of a loss that is not finite."""
    if weight == 1.0:
        return loss
    return loss * weight if weight else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def _invalid(batch: Batch) -> Batch:
    """Return the first slot of a batch, as one that does not count."""
    first = take_slots(batch, 0, 1)
    return replace(first, valid=torch.zeros_like(first.valid), source=torch.full_like(first.source, -1))
