"""A `DataLoader` that reports to its dataset what the consumer received."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from dlac_pipeline.dataset.batches import ABOUT, DictBatch, copy_batch
from dlac_pipeline.dataset.dataset import DlacDataset
from dlac_pipeline.dataset.state import State
from dlac_pipeline.read.device import Device, DeviceCopies


class DlacLoader(DataLoader[DictBatch]):
    """A `DataLoader` of whole batches that reports to its dataset what the consumer received.

    A second iteration resumes at the consumer's position, with new workers. Accelerate's `prepare` leaves it unchanged: ranks
    have their shares already, and nothing may be read ahead of the consumer. Batches are on `device`, or in host memory
    without one.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: DlacDataset,
        inputs: Callable[[DictBatch], Any] | None,
        *,
        device: Device | None,
        pin_memory: bool | None,
        options: Mapping[str, Any],
    ) -> None:
        self._copies = DeviceCopies(device, pin_memory=pin_memory)
        # If ranks end at different batches, the empty batches are made here, and so must be their conversion.
        self._late = inputs if dataset.ends_apart else None
        early = None if dataset.ends_apart else inputs
        self._source, self._unwraps = dataset, early is not None
        # DataLoader pins in a thread of its own where it has workers.
        super().__init__(dataset, batch_size=None, collate_fn=_Inputs(early), pin_memory=self._copies.pins, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names its own private iterator
        self._iterator = None  # persistent workers of an iteration that was left have read ahead
        with self._source.agreeing():
            batches: Iterator[DictBatch] = super().__iter__()
        if self.num_workers and self._source.ends_apart:
            batches = self._source.with_global_counts(batches)
        for batch in batches:
            self._source.observe(batch)
            if self._unwraps:
                yield self._copies.copy(batch["inputs"])
            elif self._late is not None:
                yield self._copies.copy(self._late(batch))
            else:
                yield copy_batch(batch, self._copies)

    def state_dict(self) -> State:
        """Return the consumer's position: that of `DlacDataset.gathered_state`, equal on all ranks. Collective if streamed."""
        return self._source.gathered_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of a state, as `DlacDataset.load_state_dict` does. Raises as that."""
        self._source.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Collate function of a loader: the batch itself, or the result of the user's function beside the batch's facts."""

    make: Callable[[DictBatch], Any] | None

    def __call__(self, batch: Any) -> DictBatch:
        return batch if self.make is None else {"inputs": self.make(batch), ABOUT: batch[ABOUT]}
