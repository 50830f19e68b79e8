"""One asynchronous all-reduce per step: carries the stop request of any rank, and the loss, to all ranks, one step late.

It adds no barrier: the result of step n is looked at when step n+1 is done, when it has long arrived. Every rank sees the
same result at the same step, so all stop, and checkpoint, at the same optimizer-step boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from catalog.errors import CursorMismatch


@dataclass(frozen=True, slots=True)
class Beat:
    """What the ranks said together after one step."""

    step: int
    loss: float
    """Mean over the ranks."""
    stop: bool
    """Whether any rank was asked to stop."""


class Pulse:
    """The beats of one rank; `group` is None when there is only one."""

    def __init__(self, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._world_size = world_size
        self._group = group
        self._pending: tuple[int, torch.Tensor, dist.Work | None] | None = None

    def send(self, step: int, *, loss: float, stop: bool) -> None:
        """Start the beat of `step`; the previous one must have been received."""
        said = torch.tensor([loss, float(stop), float(step)], dtype=torch.float64)
        work = None
        if self._world_size > 1:
            work = dist.all_reduce(said, group=self._group, async_op=True)
        self._pending = (step, said, work)

    def receive(self) -> Beat | None:
        """The beat that was sent last; None if it was received already.

        Raises:
            CursorMismatch: the ranks were not at the same step.
        """
        if self._pending is None:
            return None
        step, said, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        loss, stop, steps = said.tolist()
        if steps != step * self._world_size:
            raise CursorMismatch(
                f"expected all {self._world_size} ranks at step {step}, found steps that sum to {steps:.0f}: "
                "every rank must call step_done once per batch"
            )
        return Beat(step, loss / self._world_size, stop > 0)
