"""A bound on the size of ranks' logs, which also holds for the children and libraries of ranks."""

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MOST_LOG_BYTES = 8 * 2**20
"""Bound on the log of a rank in one attempt. Larger logs belong in files of the script."""
_LOOK_EVERY_S = 0.1
_QUIET_S = 1.0
"""Seconds between two checks while no log grows."""
_COLLAPSE_RANGE = 0x08
_BLOCK_BYTES = 4096
_LEFT_OUT = "[... {} bytes of this log were left out here, the limit is 8 MiB ...]"
_MARK_BYTES = 128
_READ_BYTES = 2**20
_COPY_ROUNDS = 8


class LogBound:
    """Bound on the size of log files: their beginning and end stay, the middle is removed.

    On ext4 and xfs the kernel removes the middle from the file, and no concurrent write of a rank is lost. On other file
    systems the end is copied, and bytes that a rank writes during the copy are lost.
    """

    def __init__(self, logs: Mapping[int, Path], max_bytes: int) -> None:
        """Watch logs by rank, from now until `close`."""
        self._logs = dict(logs)
        self._max_bytes = max_bytes
        self._left_out_bytes = dict.fromkeys(logs, 0)
        self._sizes: dict[int, int] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._watch, name="log bound", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Check the logs a last time and stop. A second call does nothing."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._check_sizes()

    def _watch(self) -> None:
        pause_s = _LOOK_EVERY_S
        while not self._closed.wait(pause_s):
            pause_s = _LOOK_EVERY_S if self._check_sizes() else _QUIET_S

    def _check_sizes(self) -> bool:
        """Cut the logs that are too large. Return True if one of them has grown since the last check."""
        has_grown = False
        for rank, path in self._logs.items():
            with suppress(OSError):  # the log does not exist yet, or its file system is unavailable for a moment
                size = path.stat().st_size
                has_grown = has_grown or size > self._sizes.get(rank, 0)
                self._sizes[rank] = size
                if size > self._max_bytes:
                    self._left_out_bytes[rank] += cut_middle(path, self._max_bytes, before=self._left_out_bytes[rank])
        return has_grown


def cut_middle(path: Path, max_bytes: int, *, before: int = 0) -> int:
    """Cut the middle of a file out, to half of the allowed size. Return the removed bytes. `before` were removed earlier."""
    head = max(_BLOCK_BYTES, max_bytes // 4 // _BLOCK_BYTES * _BLOCK_BYTES)
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        cut = (size - 2 * head) // _BLOCK_BYTES * _BLOCK_BYTES
        if cut <= 0:
            return 0
        if not collapse(descriptor, head, cut):
            cut = _copy_end(path, descriptor, head, head)
        mark = f"\n{_LEFT_OUT.format(before + cut)}\n".encode()
        os.pwrite(descriptor, mark.rjust(_MARK_BYTES, b"."), head)
        return cut
    finally:
        os.close(descriptor)


def collapse(descriptor: int, start: int, count: int) -> bool:
    """Remove a range from a file that others append to. Return False if the file system cannot."""
    if sys.platform != "linux":
        return False
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    return bool(fallocate(descriptor, _COLLAPSE_RANGE, ctypes.c_int64(start), ctypes.c_int64(count)) == 0)


def _copy_end(path: Path, descriptor: int, head: int, tail: int) -> int:
    """Remove the middle of a file, so that its head and its tail remain. Return the number of removed bytes."""
    size = os.fstat(descriptor).st_size
    end = os.pread(descriptor, tail, size - tail)
    for _ in range(_COPY_ROUNDS):  # a rank may write faster than this loop reads
        late = os.pread(descriptor, _READ_BYTES, size)
        end, size = (end + late)[-tail:], size + len(late)
        if not late:
            break
    os.ftruncate(descriptor, head)
    with path.open("ab", buffering=0) as stream:  # in append mode, as the rank writes: neither overwrites the other
        stream.write(end)
    return size - head - len(end)
