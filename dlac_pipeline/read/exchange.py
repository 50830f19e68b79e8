"""Numbers of a batch that is read ahead, summed over all ranks: started when it is read, looked at when it is handed out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlac_pipeline.read.reader import Counts, Exchange


@dataclass(frozen=True, slots=True)
class _Summed:
    numbers: torch.Tensor
    work: dist.Work | None

    def wait(self) -> Sequence[int]:
        if self.work is not None:
            self.work.wait()
        return [int(number) for number in self.numbers.tolist()]


def summing_over(group: dist.ProcessGroup | None) -> Exchange:
    """Sums over the ranks of a gloo group that nothing else uses; over this rank alone without one."""

    def start(counts: Sequence[int]) -> Counts:
        numbers = torch.tensor(counts, dtype=torch.int64)
        work = None if group is None else dist.all_reduce(numbers, group=group, async_op=True)
        return _Summed(numbers, work)

    return start
