"""Loader of a training run for a trainer with a loop of its own: batches of the run, in the trainer's form and in its parts."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dlac_pipeline.lakehouse.errors import ResumeMismatch, SpecInvalid
from dlac_pipeline.read.batch import Batch

if TYPE_CHECKING:
    from dlac_pipeline.train.training_run import TrainingRun


class RunLoader:
    """Batches of a training run. Made by `TrainingRun.loader`.

    Its position is that of the ledger. `state_dict` names it, for trainers that keep the state of a loader in their
    checkpoint. `load_state_dict` checks that the trainer has loaded the checkpoint from which the run resumes.
    """

    def __init__(
        self, run: "TrainingRun", inputs: Callable[[Batch], Any] | None, *, micro_batches: int, device: Any
    ) -> None:
        samples = run.spec.order.batch_size // run.world_size
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

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run, trained ones included. Raises TypeError if it is unknown."""
        steps = self._run.total_steps
        if steps is None:
            raise TypeError("the number of batches of a streamed run is unknown until it is read")
        return steps * self._micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining micro-batches. Before the first one the random generators are those of the checkpoint."""
        for batch in self._run.batches(device=self._device):
            whole = batch if self._inputs is None else self._inputs(batch)
            for part in split(whole, self._micro_batches):
                self._run.reset_generators()
                yield part

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


def split(value: Any, parts: int) -> list[Any]:
    """Return `value` in equal parts, cut along the first dimension of its tensors. Raise `SpecInvalid` if that is impossible."""
    if parts == 1:
        return [value]
    if isinstance(value, torch.Tensor):
        if not value.dim() or len(value) % parts:
            raise SpecInvalid(
                f"expected tensors whose first dimension is divisible into {parts} micro-batches, found the shape "
                f"{tuple(value.shape)!r}: let inputs(batch) return one row per sample"
            )
        return list(value.chunk(parts))
    if isinstance(value, Mapping):
        columns = {name: split(each, parts) for name, each in value.items()}
        return [{name: cut[part] for name, cut in columns.items()} for part in range(parts)]
    if isinstance(value, list | tuple):
        cuts = [split(each, parts) for each in value]
        make = getattr(type(value), "_make", type(value))  # of a named tuple
        return [make(cut[part] for cut in cuts) for part in range(parts)]
    if value is None or isinstance(value, bool | int | float):
        return [value] * parts
    raise SpecInvalid(
        f"expected tensors and numbers in a batch of {parts} micro-batches, found {type(value).__name__}: let "
        "inputs(batch) return a dict, list or tuple of them"
    )
