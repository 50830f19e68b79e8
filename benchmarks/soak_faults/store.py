"""A checkpoint store that can be filled up: a small file system, if mounting one is permitted."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FILLER = ".filler"


@contextmanager
def mounted(folder: Path, *, size_mb: int = 256) -> Iterator[bool]:
    """Mount a tmpfs of `size_mb` MiB at `folder`, or make a plain folder. Yield whether it is mounted."""
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
    """Fill the store to its last byte, and free it afterwards."""
    filler = folder / _FILLER
    try:
        with filler.open("wb") as stream:
            while free := os.statvfs(folder).f_bavail:
                with suppress(OSError):  # other writers reduce the free space, and this try has then taken nothing
                    size = (free + 1) // 2 * os.statvfs(folder).f_frsize
                    os.posix_fallocate(stream.fileno(), stream.seek(0, os.SEEK_END), size)
        yield
    finally:
        filler.unlink(missing_ok=True)
