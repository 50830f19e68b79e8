"""A torch dataset with a state below torchdata's `StatefulDataLoader`, as its documentation shows it."""

import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dlac_pipeline.extensions.loader_check.protocol import Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

_stateful = importlib.import_module("torchdata.stateful_dataloader")


class StatefulLoader:
    """A loader. With `batch_size=None` the dataset itself yields whole batches."""

    def __init__(
        self,
        dataset: Any,
        job: Job,
        state: bytes | None,
        *,
        batch_size: int | None,
        set_epoch: Callable[[int], None],
        sampler: Any = None,
        make: Callable[..., Any] = _stateful.StatefulDataLoader,
    ) -> None:
        self._set_epoch = set_epoch
        self._packed = job.packed
        self._loader = make(
            dataset, batch_size=batch_size, sampler=sampler, num_workers=job.workers, prefetch_factor=job.prefetch
        )
        if state is not None:
            self._loader.load_state_dict(pickle.loads(state))

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Yield the batches of a pass."""
        self._set_epoch(pass_number)
        yield from self._loader

    def ids(self, batch: Any) -> Ids:
        """Return token ids when packing, else row ids."""
        return np.asarray(batch["tokens" if self._packed else "row_id"]).reshape(-1).astype(np.int64)

    def state(self) -> bytes:
        """Return all workers' states."""
        return pickle.dumps(self._loader.state_dict())

    def close(self) -> None:
        """Do nothing: the workers end with the loader."""
        del self._loader
