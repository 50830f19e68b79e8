"""The way of batches to an accelerator: page-locked host memory first, then a copy on a stream beside the computation."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from dlac_pipeline.lakehouse.errors import SpecInvalid

Device = torch.device | str | int


@cache
def can_pin_memory() -> bool:
    """Return True if this process can allocate page-locked memory. Only the backend of an accelerator provides it."""
    if not torch.accelerator.is_available():
        return False
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:  # a backend without such an allocator
        return False
    return True


class DeviceCopies:
    """Copies the batches of one consumer to its device.

    The copy of a batch waits for no computation, and the host does not wait for the copy. The consumer's next launch on the
    current stream waits for it.
    """

    def __init__(self, device: Device | None, *, pin_memory: bool | None = None) -> None:
        """Tensors stay in host memory without a device. `pin_memory`: page-locked. None: if they go to an accelerator.

        Raises `SpecInvalid` if PyTorch does not know the device, or this node does not have it.
        """
        self._device = None if device is None else _device_named(device)
        moves = self._device is not None and self._device.type != "cpu"
        self.pins = (moves if pin_memory is None else pin_memory) and can_pin_memory()
        """True if tensors are put into page-locked memory."""
        self._moves = moves
        self.acts = self.pins or moves
        """True if a batch needs any copy."""
        self._stream: torch.Stream | None = None

    def copy(self, batch: Any) -> Any:
        """Return `batch` with its tensors in page-locked memory or on the device, or `batch` itself if no copy is needed."""
        if not self.acts:
            return batch
        pinned = _map_tensors(batch, self._pin) if self.pins else batch
        return self._copy_beside(pinned) if self._moves else pinned

    def _copy_beside(self, batch: Any) -> Any:
        assert self._device is not None
        if not hasattr(torch.get_device_module(self._device), "Stream"):
            return _map_tensors(batch, self._to_device)
        if self._stream is None:
            self._stream = torch.Stream(device=self._device)
        with self._stream:
            copied = _map_tensors(batch, self._to_device)
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._stream)
        # The memory is the copy stream's: it must not be given to the next copy while the computation reads it.
        _map_tensors(copied, lambda tensor: _record_use(tensor, current))
        return copied

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # From other memory, an asynchronous copy may read what the reader has overwritten since.
        return tensor.to(self._device, non_blocking=tensor.is_pinned())


def _record_use(tensor: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)
    return tensor


def _device_named(device: Device) -> torch.device:
    """Return the device, with the current index. Raises `SpecInvalid` if this node does not have it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    known = [torch.device("cpu")]
    if accelerator is not None:
        known += [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        named = None
    if named is not None and named.type == "cpu":
        return named
    if named is not None and accelerator is not None and named == torch.device(accelerator.type):
        named = torch.device(accelerator.type, torch.accelerator.current_device_index())
    if named is None or named not in known:
        raise SpecInvalid(
            f"expected device to be one of {[str(each) for each in known]!r}, found {device!r}: name one of these, or leave "
            "device out"
        )
    return named


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each tensor changed, through dicts, lists and tuples. Other values stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(each, change) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(each, change) for each in value))
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(each, change) for each in value)
    return value
