"""A checkpoint store that can be filled up: a small file system of its own, where mounting one is permitted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FILLER = ".filler"


@contextmanager
def mounted(folder: Path, *, size_mb: int = 256) -> Iterator[bool]:
    """A tmpfs of so many MiB at `folder`, or a plain folder; says which."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Not a byte is free in here."""
    filler = folder / _FILLER
    try:
        with filler.open("wb") as stream:
            while free := os.statvfs(folder).f_bavail:
                with suppress(OSError):  # others write meanwhile, so that there is less: nothing was taken then
                    size = (free + 1) // 2 * os.statvfs(folder).f_frsize
                    os.posix_fallocate(stream.fileno(), stream.seek(0, os.SEEK_END), size)
        yield
    finally:
        filler.unlink(missing_ok=True)
