"""File of shared memory over which a rank writes its states in turn. See docs/design/0030-memory-states.md."""

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil

from dlac_pipeline.checkpoint.stage.streamed_file import write_content

_MIN_UNMAPPED_BYTES = 1 << 20
"""A file is mapped once so many of its bytes are not."""
_MADV_POPULATE_WRITE = 23
"""Advice of Linux 5.14. The module `mmap` does not have it."""


class MemoryFile:
    """A file that is overwritten. Its pages are used again, and nothing is digested.

    The system writes bytes that the file does not have yet, and reports if memory is full. Afterwards a thread maps the pages
    that exist, and later content is copied into them, which is faster. Other pages are never touched: SIGBUS would kill the
    process if memory is full.
    """

    def __init__(self, path: Path, *, is_mapped: bool) -> None:
        """Open the file, or make it. `is_mapped` needs a file in memory. Raise `OSError` if it cannot be made."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._is_mapped = is_mapped
        self._pages: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
        """The mapped pages."""
        self._usable_bytes = 0
        """Bytes of the mapped pages that the file still has."""
        self._mapper: Thread | None = None
        self._bytes = 0
        self._failure: OSError | None = None
        self._read: Callable[[int], None] | None = None

    def overwrite(self, state: Any, read: Callable[[int], None] | None = None) -> int:
        """Write a state, and return its size. The file has this size only afterwards. Raise `OSError` if memory is full.

        `read` is given the address of each part of the state that was read just now.
        """
        self.wait_for_pages()
        self._read = read
        self._bytes, self._failure = 0, None
        self._usable_bytes = min(len(self._pages), os.fstat(self._descriptor).st_size)
        write_content(state, self)
        if self._failure is not None:
            raise self._failure
        os.ftruncate(self._descriptor, self._bytes)
        if self._is_mapped and self._bytes - len(self._pages) > _MIN_UNMAPPED_BYTES:
            mapper = Thread(target=self._map, args=(self._bytes,), daemon=True)
            with suppress(RuntimeError):  # no more threads are allowed
                mapper.start()
                self._mapper = mapper
        return self._bytes

    def write(self, data: memoryview) -> int:
        """Take `data`. A failure is kept until the end: if it were raised here, torch would report another error."""
        rest = memoryview(data).cast("B")
        part = rest[: max(0, self._usable_bytes - self._bytes)]
        if part and self._failure is None:
            # This releases the GIL.
            np.copyto(self._pages[self._bytes : self._bytes + len(part)], np.frombuffer(part, np.uint8))
            self._bytes += len(part)
            rest = rest[len(part) :]
        try:
            while len(rest) and self._failure is None:
                written = os.pwrite(self._descriptor, rest, self._bytes)
                self._bytes += written
                rest = rest[written:]
        except OSError as err:
            self._failure = err
        if self._read is not None:
            self._read(np.frombuffer(data, np.uint8).ctypes.data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""

    def close(self) -> None:
        """Unmap and close the file."""
        self.wait_for_pages()
        self._pages = np.empty(0, np.uint8)
        os.close(self._descriptor)

    def free(self) -> None:
        """Free the memory of the file, also if a forked process still has it open, and close it."""
        self.wait_for_pages()
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        self.close()

    def wait_for_pages(self) -> None:
        """Wait until the pages of the last content are mapped."""
        if self._mapper is not None:
            self._mapper.join()
            self._mapper = None

    def _map(self, size: int) -> None:
        with suppress(OSError, ValueError):  # the file was truncated, or no address space is left
            mapping = mmap.mmap(self._descriptor, size)
            mapping.madvise(mmap.MADV_DONTFORK)
            pages = np.frombuffer(mapping, np.uint8)
            # This releases the GIL, as the method of the mapping does not.
            madvise = ctypes.CDLL(None, use_errno=True).madvise
            if madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0:
                self._pages = pages


def is_tmpfs(folder: Path) -> bool:
    """Return whether the files of a folder are in memory: a page that such a file has can always be written."""
    parents = [folder.resolve(), *folder.resolve().parents]
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[each] for each in parents if each in mounts), "") == "tmpfs"
