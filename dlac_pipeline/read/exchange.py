"""Numbers of a batch that is read ahead, summed over all ranks: started when it is read, looked at when it is handed out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dlac_pipeline.read.reader import Counts, Exchange


@dataclass(slots=True)
class Waits:
    """Seconds of waiting for other ranks, until the reader of this count resets it."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Summed:
    numbers: torch.Tensor
    work: dist.Work | None
    waits: Waits = field(default_factory=Waits)

    def wait(self) -> Sequence[int]:
        if self.work is not None:
            since = time.monotonic()
            self.work.wait()
            self.waits.seconds += time.monotonic() - since
        return [int(number) for number in self.numbers.tolist()]


def summing_over(group: dist.ProcessGroup | None, waits: Waits | None = None) -> Exchange:
    """Sums over the ranks of a gloo group that nothing else uses, or over this rank alone. `waits` counts waiting."""

    def start(counts: Sequence[int]) -> Counts:
        numbers = torch.tensor(counts, dtype=torch.int64)
        work = None if group is None else dist.all_reduce(numbers, group=group, async_op=True)
        return _Summed(numbers, work, waits or Waits())

    return start
