"""Reader of a rank that needs no values: a stage in the middle of a pipeline. It decodes nothing."""

from collections.abc import Iterator
from functools import partial
from itertools import count

import numpy as np
import torch

from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.reader import Exchange, Sums, alone, until_none, with_sums


class StageReader:
    """Batches without tensors, from a step to the end of the leg."""

    groups = range(0)
    """Key groups whose cursors this rank reports: none."""

    def __init__(self, order: LegOrder, *, readers: int, step: int, exchange: Exchange = alone) -> None:
        """`readers` share a batch. `exchange` sums their counts of a streamed leg, and takes nothing from this rank."""
        self._order, self._readers, self._exchange = order, readers, exchange
        last = order.total_steps
        self._steps = iter(count(step + 1) if last is None else range(step + 1, last + 1))
        self._batches = self._counted() if order.counted else with_sums(order, self._ahead)

    def __iter__(self) -> Iterator[Batch]:
        return until_none(partial(next, self._batches, None))

    def _counted(self) -> Iterator[Batch]:
        for step in self._steps:
            yield self._batch(step, self._order.valid_rows(step))

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _ahead(self) -> tuple[Batch, Sums] | None:
        step = next(self._steps, None)
        return None if step is None else (self._batch(step, 0), self._exchange([0, 0, 0, 0]))

    def _batch(self, step: int, rows: int) -> Batch:
        return Batch(
            step=step,
            tensors={},
            valid=torch.zeros(0, dtype=torch.bool),
            source=torch.zeros(0, dtype=torch.int64),
            rows=rows,
            tokens=rows,
            readers=self._readers,
            cursors=np.zeros((0, len(self._order.sources), 4), dtype=np.int64),
        )
