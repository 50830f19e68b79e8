"""Memory that is used again: large arrays whose pages stay with the process until their owner is done with reading.

Fresh pages are expensive: the kernel clears each, which can take as long as decoding into it.
"""

import ctypes
import threading
import weakref

import numpy as np
import numpy.typing as npt

_STEP_BYTES = 2**20
_SMALLEST_BYTES = 2**20
"""Smaller arrays are left to the allocator, which keeps them automatically."""
_SPARE = 1.25
"""Largest size of a returned array in relation to the request for which it is leased again."""
Bytes = npt.NDArray[np.uint8]
ALLOCATOR_SETTINGS = {"MIMALLOC_PURGE_DELAY": "-1", "MIMALLOC_ALLOW_LARGE_OS_PAGES": "1"}
"""Environment in which Arrow's allocator does the same for decoded data: it keeps freed pages, in large ones."""


class Buffers:
    """Leases of arrays. Leased and kept memory together never exceed the largest amount leased at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may return an array in the middle of a lease
        self._free: list[Bytes] = []
        self._leased_bytes = 0
        self.peak_bytes = 0
        """The most that was leased at a time."""

    @property
    def nbytes(self) -> int:
        """Leased and kept bytes."""
        with self._lock:
            return self._leased_bytes + sum(map(len, self._free))

    def lease(self, nbytes: int) -> Bytes:
        """Return an array of this size, uint8, with undefined content. It returns when neither it nor a view of it exists."""
        if nbytes < _SMALLEST_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        size = -(-nbytes // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            whole = self._find_free(size)
            self._leased_bytes += len(whole)
            self.peak_bytes = max(self.peak_bytes, self._leased_bytes)
        # The owner must not be a numpy array: views refer to the lowest one, so others would be returned too early.
        handle = (ctypes.c_ubyte * len(whole)).from_buffer(whole.data)
        weakref.finalize(handle, self._back, whole).atexit = False
        return np.frombuffer(memoryview(handle).cast("B"), dtype=np.uint8)[:nbytes]

    def _find_free(self, size: int) -> Bytes:
        fitting = [each for each in reversed(self._free) if size <= len(each) <= _SPARE * size]
        if fitting:
            chosen = min(fitting, key=len)  # of equal ones the last one used, which may be in a cache
            self._free = [each for each in self._free if each is not chosen]
            return chosen
        self._trim(size)
        return np.empty(size, dtype=np.uint8)

    def _back(self, whole: Bytes) -> None:
        with self._lock:
            self._leased_bytes -= len(whole)
            self._free.append(whole)
            self._trim(0)

    def _trim(self, wanted: int) -> None:
        """Release what would exceed the largest amount ever leased at a time, the longest unused first."""
        limit = max(self.peak_bytes, self._leased_bytes + wanted)
        while self._free and self._leased_bytes + wanted + sum(map(len, self._free)) > limit:
            del self._free[0]
