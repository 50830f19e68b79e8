"""Numbers of a batch that is read ahead, summed over all ranks: started when it is read, looked at when it is handed out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlac_pipeline.read.reader import Exchange, Sums


@dataclass(slots=True)
class Waits:
    """Seconds of waiting for other ranks, until the reader of this count resets it."""

    seconds: float = 0.0


def summing_over(group: dist.ProcessGroup | None, waits: Waits | None = None) -> Exchange:
    """Sums over the ranks of a gloo group that nothing else uses, or over this rank alone. `waits` counts waiting."""
    waited = waits or Waits()

    def start(counts: Sequence[int]) -> Sums:
        numbers = torch.tensor(counts, dtype=torch.int64)
        work = None if group is None else dist.all_reduce(numbers, group=group, async_op=True)

        def wait() -> Sequence[int]:
            if work is not None:
                since = time.monotonic()
                work.wait()
                waited.seconds += time.monotonic() - since
            return [int(number) for number in numbers.tolist()]

        return wait

    return start
