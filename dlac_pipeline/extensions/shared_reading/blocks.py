"""Blocks of shared memory: one process writes the tensors of a batch into a block, and others map it.

A block is an anonymous file (memfd), so that nothing is left when its processes die. Its first page counts, for each process
that maps it, how many batches that process is done with. The writer uses a block again when all are done with it.
"""

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.memory import Bytes

_PAGE = mmap.PAGESIZE
MOST_PROCESSES = _PAGE // 8
"""Processes that can map a block: each has a counter in the first page."""
_ALIGNED = 64
"""Bytes to whose multiples tensors are aligned."""
_SPARE = 1.25
"""Size of a block in relation to the batch for which it is made: the next ones may be a little larger."""
Layout = list[tuple[str, list[int], int]]
"""Type, shape and place of each tensor in a block."""


def layout_of(tensors: Sequence[torch.Tensor]) -> tuple[Layout, int]:
    """Return the layout of tensors in a block, and their bytes with padding."""
    layout: Layout = []
    end = 0
    for tensor in tensors:
        layout.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return layout, end


def _place(layout: Layout, memory: Bytes) -> Iterator[torch.Tensor]:
    """Yield each tensor of a layout as a view of memory. The memory lasts as long as one of them."""
    for kind, shape, start in layout:
        dtype: torch.dtype = getattr(torch, kind)
        end = start + math.prod(shape) * dtype.itemsize
        yield torch.from_numpy(memory[start:end]).view(dtype).reshape(shape)


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A block, as the process that writes it has it."""

    number: int
    size: int
    """Bytes for tensors."""
    file: int
    """Descriptor of the file."""
    memory: Bytes
    done: Ints
    """Batches that each other process is done with, int64 [processes]."""
    given: int = 0
    """Batches that the other processes were given."""

    def is_free(self) -> bool:
        """Return whether all processes are done with the block."""
        return bool((self.done == self.given).all())


class Blocks:
    """The blocks of a process that writes, for so many others."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._blocks: list[MemoryBlock] = []

    def write(self, tensors: Sequence[torch.Tensor]) -> tuple[MemoryBlock, bool, Layout]:
        """Copy tensors into a block that is free. Return it, whether it is new under its number, and the layout.

        Raise `SpecInvalid` if the node has no memory for it.
        """
        layout, nbytes = layout_of(tensors)
        free = [each for each in self._blocks if each.is_free()]
        fitting = [each for each in free if each.size >= nbytes]
        if fitting:
            block = min(fitting, key=lambda each: each.size)
        else:
            number = free[0].number if free else len(self._blocks)
            block = self._make(number, max(_PAGE, int(nbytes * _SPARE)))
            self._blocks[number : number + 1] = [block]
            for small in free[:1]:
                os.close(small.file)
        for target, tensor in zip(_place(layout, block.memory), tensors, strict=True):
            target.copy_(tensor)
        block.given += 1
        return block, not fitting, layout

    def close(self) -> None:
        """Close the files. Processes that have mapped one keep its memory."""
        for block in self._blocks:
            os.close(block.file)
        self._blocks.clear()

    def _make(self, number: int, size: int) -> MemoryBlock:
        file = os.memfd_create("dlac-batches")
        try:
            os.posix_fallocate(file, 0, _PAGE + size)  # else a full memory ends the process at its first write
        except OSError as err:
            os.close(file)
            raise SpecInvalid(
                f"expected {size} bytes of shared memory for a batch, found {err.strerror}: free memory on the node, or set "
                'read.shares = "each"'
            ) from err
        shared = np.frombuffer(mmap.mmap(file, _PAGE + size), dtype=np.uint8)
        return MemoryBlock(number, size, file, shared[_PAGE:], shared[: self._others * 8].view(np.int64))


class MappedBlock:
    """A block, as a process that reads it has it."""

    def __init__(self, file: int, index: int) -> None:
        """`index`: number of the process among those that read. The file is closed at the end."""
        self._file, self._owner = file, os.getpid()
        os.set_inheritable(file, False)
        self._size = os.fstat(file).st_size
        self.live = 0
        """Batches whose tensors are in use."""
        self._lock = threading.RLock()  # a thread maps, and any may drop the last tensor of a batch
        self._done = np.frombuffer(mmap.mmap(file, _PAGE), dtype=np.int64)[index : index + 1]

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        """Return the tensors of one batch, in pages of this process's own as soon as it writes to them."""
        private = mmap.mmap(self._file, self._size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        # The owner must not be a numpy array: views refer to the lowest one, which would end too early.
        handle = (ctypes.c_ubyte * self._size).from_buffer(private)
        weakref.finalize(handle, self._finish).atexit = False
        with self._lock:
            self.live += 1
        memory = np.frombuffer(memoryview(handle).cast("B"), dtype=np.uint8)[_PAGE:]
        return [*_place(layout, memory)]

    def close(self) -> None:
        """Close the file. Mapped tensors stay."""
        os.close(self._file)

    def _finish(self) -> None:
        if os.getpid() == self._owner:  # a forked process has dropped its own copy
            with self._lock:
                self.live -= 1
                self._done += 1
