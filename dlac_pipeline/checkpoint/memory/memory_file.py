"""File of shared memory over which a rank writes one state after the other. See docs/design/0030-memory-states.md."""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from dlac_pipeline.checkpoint.stage.streamed_file import write_content

_LEAST_BYTES = 1 << 20
"""Bytes at the end of a file that need not be mapped."""
_CHUNK_BYTES = 8 << 20
"""Bytes whose pages are mapped at once, while no other thread of Python runs: about a millisecond."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""


class MemoryFile:
    """A file that is overwritten. Its pages are used again, and nothing is digested.

    The system writes what the file does not have yet, and so reports if memory is full. Pages that exist are mapped
    afterwards, in the background. Later content is copied into them, about three times as fast. No other page is mapped: if
    memory is full then, the process would be ended.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raise `OSError` if it cannot be made."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._pages: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
        """What is mapped."""
        self._mapper: Thread | None = None
        self._mapped_bytes = 0
        """Bytes of the pages that exist."""
        self._bytes = 0
        self._failure: OSError | None = None

    def overwrite(self, state: Any) -> int:
        """Write a state, and return its size. The file is as long only when this returns. Raise `OSError` if memory is full."""
        if self._mapper is not None:
            self._mapper.join()
        self._bytes, self._failure = 0, None
        # a page that was cut off is no page any more
        self._mapped_bytes = min(len(self._pages), os.fstat(self._descriptor).st_size)
        write_content(state, self)
        if self._failure is not None:
            raise self._failure
        os.ftruncate(self._descriptor, self._bytes)
        if self._bytes - len(self._pages) > _LEAST_BYTES:
            self._mapper = Thread(target=self._map, args=(self._bytes,), daemon=True)
            self._mapper.start()
        return self._bytes

    def write(self, data: memoryview) -> int:
        """Take `data`. A failure is kept until the end: if it were raised here, torch would report its own."""
        rest = memoryview(data).cast("B")
        part = rest[: max(0, self._mapped_bytes - self._bytes)]
        if part and self._failure is None:
            np.copyto(
                self._pages[self._bytes : self._bytes + len(part)], np.frombuffer(part, np.uint8)
            )  # releases the GIL
            self._bytes += len(part)
            rest = rest[len(part) :]
        try:
            while len(rest) and self._failure is None:
                written = os.pwrite(self._descriptor, rest, self._bytes)
                self._bytes += written
                rest = rest[written:]
        except OSError as err:
            self._failure = err
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Free what is mapped. Memory of a removed file is free only then."""
        if self._mapper is not None:
            self._mapper.join()
        self._pages = np.empty(0, np.uint8)
        os.close(self._descriptor)

    def _map(self, size: int) -> None:
        with suppress(OSError, ValueError):  # an old kernel, or the file was cut: the system writes it
            pages = mmap.mmap(self._descriptor, size)
            for start in range(0, size, _CHUNK_BYTES):
                pages.madvise(_POPULATE_WRITE, start, min(_CHUNK_BYTES, size - start))
            self._pages = np.frombuffer(pages, np.uint8)
