"""Lines of the log of a rank, which may grow and be cut while it is read."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

_READ_BYTES = 2**20
_SEARCHED_BYTES = 64 * 2**20
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


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
