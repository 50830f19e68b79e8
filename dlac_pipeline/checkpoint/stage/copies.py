"""Writers of an engine's states: written at once, or copied and written in the background."""

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dlac_pipeline.checkpoint.stage.streamed_file import Frozen, TensorFile, WrittenFile, write_state
from dlac_pipeline.checkpoint.stage.watch import Key, Watch, is_plain, storage_key, whole
from dlac_pipeline.lakehouse.errors import StateChanged
from dlac_pipeline.read.device import can_pin_memory

Write = Callable[[Path, Any], None]
"""Writes or copies one file of a checkpoint: its path, and its content, which may change afterwards. It may raise OSError."""
_PLAIN = frozenset({int, float, str})
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

    finish = close = handed_over


class CopyMemory:
    """Host memory for copies, used again by the next checkpoint: fresh pages would cost as much as copying."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, bool], list[torch.UntypedStorage]] = defaultdict(list)
        self._stream: torch.Stream | None = None

    def stream_after(self, moment: torch.Event) -> torch.Stream:
        """Return an accelerator's stream for copies, which continues after this moment of another one."""
        self._stream = self._stream or torch.Stream(device=moment.device)
        self._stream.wait_event(moment)
        return self._stream

    def copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The bytes of a storage on any device, in host memory."""
        mine = self.room_for(storage)
        # As a tensor, so that large ones are copied by all threads. PyTorch copies words faster than bytes.
        dtype = torch.uint8 if storage.nbytes() % 8 or storage.data_ptr() % 8 else torch.int64
        whole(mine, dtype).copy_(whole(storage, dtype))
        return mine

    def room_for(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return host memory for a copy."""
        pinned = storage.device.type != "cpu" and can_pin_memory()
        free = self._free[storage.nbytes(), pinned]
        if not free:
            free.append(torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage())
        return free.pop()

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
        *,
        stable: Mapping[Key, str] | None = None,
        streams: bool = False,
    ) -> None:
        """`stable` storages are left to `finish`, or if it `streams`, to `save`, which then reads those in host memory.

        Training calls `wait` before it changes them.
        """
        self._memory = memory
        self._save = save
        self._stable = stable or {}
        self._streams = streams
        self._reads_originals = False
        self.watch = Watch()
        self._left: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        """Memory of copies, and the storages that are copied later."""
        self._moment: torch.Event | None = None
        """Moment after which an accelerator may begin with them."""
        self._is_read = threading.Event()
        self._torn = ""
        """Name of a tensor that changed before everything was read."""
        self.waited_s = 0.0
        """Seconds for which training waited for them."""
        self._states: list[tuple[Path, Any]] = []
        self._storages: dict[Key, torch.UntypedStorage] = {}
        self._originals: list[torch.UntypedStorage] = []
        """Kept while states are passed on: while they live, no other storage can have their addresses."""

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of the copies that are not written yet."""
        return [mine for key, mine in self._storages.items() if mine.data_ptr() != key[0]]  # not an original

    def write(self, path: Path, state: Any) -> None:
        """Copy it. A trainer's file is written now: the trainer may replace or remove it later."""
        if isinstance(state, WrittenFile):
            self._save(state, path)
            return
        is_frozen = isinstance(state, Frozen)
        self._states.append((path, Frozen(self._copy_of(state.state)) if is_frozen else self._copy_of(state)))

    def handed_over(self) -> None:
        """The states themselves are not needed any more."""
        self._originals.clear()
        device = next((storage.device for _, storage in self._left if storage.device.type != "cpu"), None)
        self._moment = None if device is None else torch.accelerator.current_stream(device).record_event()

    def copy_rest(self) -> None:
        """Copy the storages that are left."""
        stream = None if self._moment is None else self._memory.stream_after(self._moment)
        with stream or nullcontext():
            for mine, storage in self._left:
                if stream is None:
                    np.copyto(whole(mine).numpy(), whole(storage).numpy())  # in this thread only, without the GIL
                else:
                    whole(mine).copy_(whole(storage), non_blocking=True)
                    stream.synchronize()
                self.watch.compare(storage.data_ptr())
        self._left.clear()
        if not self._reads_originals:
            self._end_reading()

    def _end_reading(self) -> None:
        """Let training change everything. The copies are complete, so that later changes do not matter to them."""
        if not self._is_read.is_set():
            self._torn = self.watch.changed
            self._is_read.set()

    def wait(self) -> bool:
        """Wait until training may change everything, and return whether something has changed already."""
        started = time.monotonic()
        self._is_read.wait()
        self.watch.compare(content=False)
        self.waited_s = time.monotonic() - started
        return bool(self.watch.changed)

    def finish(self) -> None:
        """Write the copies, and let the memory be used again.

        Raise `OSError` if something cannot be written, `StateChanged` if it may have parts of different steps.
        """
        self.copy_rest()
        for path, state in self._states:
            self._save(state, path)
        if self._reads_originals:
            self.watch.compare()
        self._end_reading()
        self._states.clear()
        self._memory.give_back(self.storages)
        self._storages.clear()
        if self._torn:
            raise StateChanged(
                f"expected only the optimizer's step to change {self._torn!r} after the request for a batch, found "
                "another change while it was copied: change it between run.step_done and that request, or set "
                'checkpoint.mode = "synchronous"'
            )

    def close(self) -> None:
        """Let training change everything: nothing more is written."""
        self._is_read.set()

    def _copy_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, TensorFile):
            return TensorFile({name: self._written_alone(each) for name, each in value.tensors.items()}, value.about)
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps its type, and the attributes of a state_dict
            for key, each in value.items():  # `update` of a Counter adds
                copied[key] = self._copy_of(each)
            return copied
        if type(value) in (list, tuple):
            return type(value)(value if _PLAIN.issuperset(map(type, value)) else map(self._copy_of, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._copy_of(each) for each in value))
        return value if type(value) in _PLAIN else copy.deepcopy(value)

    def _written_alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of a file that has no storages. Only from the begin of its storage on is it found that it was read."""
        is_copied = not self._streams or tensor.device.type != "cpu"
        is_known = is_copied or (tensor.is_contiguous() and tensor.storage_offset() == 0)
        return self._tensor(tensor) if is_known else tensor.detach().clone()

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into host memory. One that consists of others, such as a DTensor, is composed of copies of these."""
        plain = is_plain(tensor)
        if not plain and is_traceable_wrapper_subclass(tensor):
            return self._made_of_copies(tensor)
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            own = tensor.detach()
            return copy.deepcopy(own) if own.device.type == "cpu" else own.cpu()
        key = storage_key(tensor)
        if key in self._stable:
            self.watch.add(self._stable[key], tensor)
        if key not in self._storages:
            self._originals.append(tensor.untyped_storage())
            self._storages[key] = self._taken(key, self._originals[-1])
        mine = self._storages[key]
        copied = torch.empty(0, dtype=tensor.dtype).set_(mine, tensor.storage_offset(), tensor.size(), tensor.stride())
        return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied

    def _taken(self, key: Key, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage, or memory for a later one, or itself if it is read later."""
        if key not in self._stable:
            return self._memory.copy_of(storage)
        if storage.device.type == "cpu" and self._streams:
            self._reads_originals = True
            return storage
        self._left.append((self._memory.room_for(storage), storage))
        return self._left[-1][0]

    def _made_of_copies(self, tensor: Any) -> torch.Tensor:
        """Make the same kind of tensor from copies of its tensors. Its other parts, such as a device mesh, are shared."""
        names, rest = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        copied = {name: self._tensor(part) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
        result: torch.Tensor = tensor.__tensor_unflatten__(copied, rest, tensor.size(), tensor.stride())
        return result


Writer = Direct | Copies
"""Writer of the states of one checkpoint."""


def in_thread(work: Callable[[], Any], name: str) -> Future[Any]:
    """Begin with work in a daemon thread, for which no failing process waits, and return its result to come."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as err:
            result.set_exception(err)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
