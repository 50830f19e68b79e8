"""Writers of an engine's states: written at once, or copied now and written in the background."""

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dlac_pipeline.checkpoint.stage.streamed_file import TensorFile, WrittenFile, write_state
from dlac_pipeline.read.device import can_pin_memory

Write = Callable[[Path, Any], None]
"""Writes or copies one file of a checkpoint: its path, and its content, which may change afterwards. It may raise OSError."""
Save = Callable[[Any, Path], object]
"""Writes a state to a file, in any thread."""


class Direct:
    """Writes at once, with `save`."""

    def __init__(self, save: Save = write_state) -> None:
        self._save = save

    def write(self, path: Path, state: Any) -> None:
        """Write it."""
        self._save(state, path)

    def handed_over(self) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        """Everything is written."""


class CopyMemory:
    """Host memory for copies, used again by the next checkpoint: fresh pages would cost as much as copying."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, bool], list[torch.UntypedStorage]] = defaultdict(list)

    def copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The bytes of a storage on any device, in host memory."""
        pinned = storage.device.type != "cpu" and can_pin_memory()
        free = self._free[storage.nbytes(), pinned]
        if not free:
            free.append(torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage())
        mine = free.pop()
        # As a tensor, so that large ones are copied by all threads. PyTorch copies words faster than bytes.
        dtype = torch.uint8 if storage.nbytes() % 8 or storage.data_ptr() % 8 else torch.int64
        _whole(mine, dtype).copy_(_whole(storage, dtype))
        return mine

    def give_back(self, storages: list[torch.UntypedStorage]) -> None:
        """Note that these copies are free. Copies that the last checkpoint did not use are released."""
        self._free.clear()
        for storage in storages:
            self._free[storage.nbytes(), storage.is_pinned()].append(storage)


class Copies:
    """Copies of every state, tensors with the storages that they share. `finish` writes them with `save`, in any thread."""

    def __init__(
        self,
        memory: CopyMemory,
        save: Save = write_state,
        copied: Callable[[tuple[int, int]], None] = lambda _: None,
    ) -> None:
        """`copied` is given the key of each storage at once, while it is in the processor's cache."""
        self._memory = memory
        self._copied = copied
        self._save = save
        self._states: list[tuple[Path, Any]] = []
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._originals: list[torch.UntypedStorage] = []
        """Kept while states are passed on: while they live, no other storage can have their addresses."""
        self.bytes = 0
        """Bytes of the copies."""

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of the copies that are not written yet."""
        return list(self._storages.values())

    def write(self, path: Path, state: Any) -> None:
        """Copy it. A trainer's file is written now: the trainer may replace or remove it later."""
        if isinstance(state, WrittenFile):
            self._save(state, path)
            return
        self._states.append((path, self._copy_of(state)))

    def handed_over(self) -> None:
        """The states themselves are not needed any more."""
        self._originals.clear()

    def finish(self) -> None:
        """Write the copies, and let the memory be used again. Raise `OSError` if something cannot be written."""
        for path, state in self._states:
            self._save(state, path)
        self._states.clear()
        self._memory.give_back(self.storages)
        self._storages.clear()

    def _copy_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, TensorFile):
            return TensorFile(self._copy_of(value.tensors), value.about)
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps its type, and the attributes of a state_dict
            for key, each in value.items():  # `update` of a Counter adds
                copied[key] = self._copy_of(each)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copy_of(each) for each in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._copy_of(each) for each in value))
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into host memory. One that consists of others, such as a DTensor, is composed of copies of these."""
        plain = _is_plain(tensor)
        if not plain and is_traceable_wrapper_subclass(tensor):
            return self._made_of_copies(tensor)
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            own = tensor.detach()
            return copy.deepcopy(own) if own.device.type == "cpu" else own.cpu()
        key = storage_key(tensor)
        if key not in self._storages:
            storage = tensor.untyped_storage()
            self._originals.append(storage)
            self._storages[key] = self._memory.copy_of(storage)
            self._copied(key)
            self.bytes += storage.nbytes()
        mine = self._storages[key]
        copied = torch.empty(0, dtype=tensor.dtype).set_(mine, tensor.storage_offset(), tensor.size(), tensor.stride())
        return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied

    def _made_of_copies(self, tensor: Any) -> torch.Tensor:
        """Make the same kind of tensor from copies of its tensors. Its other parts, such as a device mesh, are shared."""
        names, rest = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        copied = {name: self._tensor(part) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
        result: torch.Tensor = tensor.__tensor_unflatten__(copied, rest, tensor.size(), tensor.stride())
        return result


Writer = Direct | Copies
"""Writer of the states of one checkpoint."""


def storage_key(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's storage, zeros for other kinds of tensors."""
    if not _is_plain(tensor):
        return 0, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _whole(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
