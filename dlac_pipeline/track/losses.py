"""The loss of a step, read late: it goes into host memory while the device computes the next step."""

from dataclasses import dataclass

import torch

from dlac_pipeline.read.device import can_pin_memory


@dataclass(frozen=True, slots=True)
class ReadLoss:
    """A loss that is being read."""

    number: torch.Tensor | float
    """The number, or where it will be in host memory."""
    copied: torch.Event | None
    """The end of its copy, or None if none is in progress."""

    @property
    def is_late(self) -> bool:
        """True if the number is waited for, because an accelerator computes it."""
        return self.copied is not None

    def wait(self) -> float:
        """Return the number, as soon as it is known."""
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.number)


def start_reading(loss: torch.Tensor | float, *, waits: bool = False) -> ReadLoss:
    """Begin to read a loss. One on an accelerator is copied after the work that was launched there.

    The copy is not waited for, unless `waits` is true.
    """
    if not isinstance(loss, torch.Tensor):
        return ReadLoss(loss, None)
    accelerator = torch.accelerator.current_accelerator()
    if waits or accelerator is None or loss.device.type != accelerator.type:
        return ReadLoss(loss.item(), None)
    gather = getattr(loss, "full_tensor", None)  # a DTensor has it
    number = loss if gather is None else gather()
    host = torch.empty((), dtype=loss.dtype, pin_memory=can_pin_memory())
    host.copy_(number.detach().reshape(()), non_blocking=True)
    return ReadLoss(host, torch.accelerator.current_stream(loss.device).record_event())
