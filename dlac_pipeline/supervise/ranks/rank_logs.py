"""Logs of ranks: how to read them, and a bound on their size, which also holds for the children and libraries of ranks."""

import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

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
_SEARCHED_BYTES = 64 * 2**20
_COPY_ROUNDS = 8
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


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


class LogReader:
    """Reader of the lines of a log, and of lines that are appended later."""

    def __init__(self, path: Path, *, lines: int | None = None) -> None:
        """Begin with the last lines of what exists, or with all of it."""
        self._path = path
        self._lines = lines
        self._at = -1
        self._rest = b""

    def read(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call. If the log was cut since then, a line reports it."""
        with suppress(FileNotFoundError), self._path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            if self._at < 0:
                self._at = 0 if self._lines is None else _start_of_last(stream, size, self._lines)
            if size < self._at:
                self._at, self._rest = size, b""
                yield "[... some lines were removed from this log, the limit is 8 MiB ...]"
            stream.seek(self._at)
            while raw := stream.read(min(_READ_BYTES, size - self._at)):
                self._at += len(raw)
                *lines, self._rest = (self._rest + raw).split(b"\n")
                yield from map(readable, lines)
                if len(self._rest) > _READ_BYTES:
                    yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Yield the last line if no newline ends it."""
        if self._rest:
            yield readable(self._rest)
            self._rest = b""


def _start_of_last(stream: IO[bytes], size: int, lines: int) -> int:
    """Return the position at which the last lines of a file begin. If lines are very long, only the end is searched."""
    start, found = size, b""
    while start > 0 and len(found) < _SEARCHED_BYTES:
        step = min(_READ_BYTES, start)
        start -= step
        stream.seek(start)
        found = stream.read(step) + found
        breaks = found.rstrip(b"\n").count(b"\n")
        if breaks >= lines:
            skipped = found.rstrip(b"\n").rsplit(b"\n", lines)[0] if lines else found
            return start + len(skipped) + (1 if lines else 0)
    return start


def readable(line: bytes) -> str:
    """Return a line without characters that move a terminal's cursor. Of an overwritten line, return its last text."""
    text = _ESCAPES.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
    return "".join(each for each in text if each == "\t" or each.isprintable())
