"""Messages of all ranks per step: a small asynchronous all-reduce about every two seconds carries losses and notices.

A message that is sent after step n is read after step n+1, at the same step by every rank, so that all ranks stop at the same
boundary. A loss that an accelerator computes is read a step later, so that the host does not wait for the device. If any rank
has such a loss, the messages of all ranks cover the steps up to the one before the last. A flush waits for every loss.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.read.device import can_pin_memory
from dlac_pipeline.spec.launch_spec import NOTICES

SYNC_EVERY_S = 2.0
MAX_STEPS = 64
"""Most steps between two messages. It limits how late a notice during fast steps is received."""


@dataclass(frozen=True, slots=True)
class ReadLoss:
    """A loss that is being read."""

    number: torch.Tensor | float
    """The number, or where it will be in host memory."""
    copied: torch.Event | None
    """The end of its copy, or None if no accelerator computes it."""

    def wait(self) -> float:
        """Return the number, as soon as it is known."""
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.number)


def start_reading(loss: torch.Tensor | float | None, *, waits: bool = False) -> ReadLoss:
    """Begin to read a loss, 0 for None. A copy from an accelerator is not waited for, unless `waits` is true."""
    if not isinstance(loss, torch.Tensor):
        return ReadLoss(loss or 0.0, None)
    accelerator = torch.accelerator.current_accelerator()
    if waits or accelerator is None or loss.device.type != accelerator.type:
        return ReadLoss(loss.item(), None)
    gather = getattr(loss, "full_tensor", None)  # a DTensor has it
    number = loss if gather is None else gather()
    host = torch.empty((), dtype=loss.dtype, pin_memory=can_pin_memory())
    host.copy_(number.detach().reshape(()), non_blocking=True)
    return ReadLoss(host, torch.accelerator.current_stream(loss.device).record_event())


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """Report of one rank, without its losses."""

    notice: str | None = None
    """Notice from NOTICES, if the rank was asked to stop."""
    notice_age_s: float = 0.0
    due: bool = False
    """Rank 0: a checkpoint is due."""
    needed_s: float = 0.0
    """Rank 0: seconds until a checkpoint that begins now is committed, or 0 if unknown."""
    makes_room: bool = False
    """Rank 0: the attempt is to exit so that more nodes can join."""
    memory_steps: int = 0
    """Rank 0: steps between two memory states, or 0 if it does not know."""
    memory_failed: bool = False
    """True if the rank cannot keep memory states."""
    memory_copied: bool = False
    """True if the last memory state of the rank is whole, and its node has copied it to the buddy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSync(RankReport):
    """Reports of all ranks together: the first of NOTICES that any rank has, and the mean age over the ranks that have one.

    `memory_copied` is true if it is so for all ranks.
    """

    step: int
    """The last step that the message covers."""
    losses: list[float]
    """Mean over the ranks with a loss of each covered step's loss. `step` is the last one."""


@dataclass(frozen=True, slots=True)
class _Sent:
    step: int
    """The last finished step of this rank."""
    covered_step: int
    """The last step whose loss is in it."""
    own: list[float]
    """This rank's losses in it."""
    numbers: torch.Tensor
    work: dist.Work | None


class Syncs(Protocol):
    """The messages of all ranks about their steps, as one rank sends and receives them."""

    waits_for_losses: bool
    """True if the host waits for every loss in the loss's step, so that a device error is raised in the step of its rows."""

    def step_done(self, step: int, *, loss: torch.Tensor | float | None, report: RankReport) -> StepSync | None:
        """Note a finished step. Return the message that has arrived."""

    def unknown_losses(self) -> list[float | None] | None:
        """Return this rank's losses of the steps whose messages have not arrived. None if an accelerator computes one.

        A rank that passes no losses has None in place of each.
        """
        return None

    def flush(self) -> list[StepSync]:
        """Return everything that was reported up to the last finished step. Waits for it."""


class StepSyncs(Syncs):
    """The messages of one rank. `group` is None for a single rank. Its methods are collective, in step order."""

    def __init__(self, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._world_size = world_size
        self._has_loss = True
        """False if the script passes no losses at this rank, as at a stage of a pipeline that is not the last one."""
        self._group = group
        self._steps_per_sync = 1
        self._losses: list[ReadLoss] = []
        self.waits_for_losses = False
        self._late_steps = 0
        """Number of last losses for which no message waits: 1 if any rank's losses come from an accelerator."""
        self._report = RankReport()
        self._step = 0
        self._sent_at: float | None = None
        self._pending: _Sent | None = None

    def step_done(self, step: int, *, loss: torch.Tensor | float | None, report: RankReport) -> StepSync | None:
        """Note a finished step, and send a message when it is time. Return the message that has arrived."""
        sync = self._receive()
        self._has_loss = loss is not None
        self._step, self._report = step, report
        self._losses.append(start_reading(loss, waits=self.waits_for_losses))
        if len(self._losses) >= self._steps_per_sync + self._late_steps:
            self._send(late_steps=self._late_steps)
        return sync

    def unknown_losses(self) -> list[float | None] | None:
        """Return this rank's losses of the steps whose messages have not arrived, as `Syncs` says."""
        sent = [] if self._pending is None else self._pending.own
        own = [float(each.number) for each in self._losses if each.copied is None]
        if len(own) < len(self._losses) or self._late_steps:
            return None
        return [each if self._has_loss else None for each in (*sent, *own)]

    def flush(self) -> list[StepSync]:
        """Return everything that was reported up to the last finished step. Waits for it."""
        syncs = [self._receive()]
        if self._losses:
            self._send(late_steps=0)
            syncs.append(self._receive())
        return [sync for sync in syncs if sync is not None]

    def report(self, report: RankReport) -> StepSync:
        """Return the reports of all ranks between two steps, once everything is flushed. Waits for them."""
        self._report = report
        self._send(late_steps=0)
        sync = self._receive()
        assert sync is not None, "it was sent"
        return sync

    def _send(self, *, late_steps: int) -> None:
        """Send the losses of all steps but the last `late_steps`, and this rank's report."""
        now = time.monotonic()
        elapsed_s = SYNC_EVERY_S if self._sent_at is None else now - self._sent_at
        self._sent_at = now
        count = len(self._losses) - late_steps
        losses = [loss.wait() for loss in self._losses[:count]]
        report, is_late = self._report, any(loss.copied is not None for loss in self._losses)
        numbers = [
            *(self._step, elapsed_s, report.notice_age_s, report.due, report.needed_s, report.makes_room),
            *(report.memory_steps, report.memory_failed, report.memory_copied, is_late, self._has_loss),
            *(report.notice == each for each in NOTICES),
        ]
        padding = [0.0] * (MAX_STEPS - count)
        message = torch.tensor([*numbers, *losses, *padding], dtype=torch.float64)
        work = dist.all_reduce(message, group=self._group, async_op=True) if self._world_size > 1 else None
        self._pending = _Sent(self._step, self._step - late_steps, losses, message, work)
        self._losses = self._losses[count:]

    def _receive(self) -> StepSync | None:
        """Return the message in flight, or None. Raise `CursorMismatch` if the ranks were not at the same step."""
        sent, self._pending = self._pending, None
        if sent is None:
            return None
        if sent.work is not None:
            sent.work.wait()
        steps, elapsed_s, ages_s, due, needed_s, makes_room, *rest = sent.numbers.tolist()
        memory_steps, memory_failed, memory_copied, late, with_loss, *rest = rest
        notices, losses = rest[: len(NOTICES)], rest[len(NOTICES) :]
        if steps != sent.step * self._world_size:
            raise CursorMismatch(
                f"expected all {self._world_size} ranks at step {sent.step}, found steps that sum to {steps:.0f}: "
                "every rank must call step_done once per batch"
            )
        if sent.own:
            step_s = max(elapsed_s / self._world_size / len(sent.own), 1e-6)
            self._steps_per_sync = max(1, min(MAX_STEPS, int(SYNC_EVERY_S / step_s)))
            self._late_steps = int(late > 0)
        return StepSync(
            step=sent.covered_step,
            losses=[loss / max(1.0, with_loss) for loss in losses[: len(sent.own)]],
            notice=next((name for name, ranks in zip(NOTICES, notices, strict=True) if ranks), None),
            notice_age_s=ages_s / max(1.0, sum(notices)),
            due=due > 0,
            needed_s=needed_s,
            makes_room=makes_room > 0,
            memory_steps=int(memory_steps),
            memory_failed=memory_failed > 0,
            memory_copied=memory_copied == self._world_size,
        )
