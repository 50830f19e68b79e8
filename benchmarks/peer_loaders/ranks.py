"""The ranks of a launch as one group, as they are in a training: they step, save and exit together."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


class Ranks:
    """The process group of a launch. One rank alone needs none."""

    def __init__(self, world_size: int) -> None:
        self._count = world_size
        if world_size > 1:
            dist.init_process_group("gloo")

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value] * self._count
        if self._count > 1:
            dist.all_gather_object(values, value)
        return values

    def step_together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this rank, each when all ranks have theirs. A rank that has no more waits for the others."""
        for batch in itertools.chain(batches, itertools.repeat(None)):
            if not any(self.gather(batch is not None)):
                return
            if batch is not None:
                yield batch
