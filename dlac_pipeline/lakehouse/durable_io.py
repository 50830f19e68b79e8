"""Files and folders that survive a power cut, and locks of files, which end with their process."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def fsync_path(path: str | Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder_durably(folder: Path) -> None:
    """Make a folder and all missing folders above it, and make their names durable. Below a file none can be made."""
    missing = [each for each in (folder, *folder.parents) if not (each.is_dir() if each == folder else each.exists())]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        fsync_path(each.parent)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a unique name beside `path`, for a file that becomes `path` when it is whole. It is removed on failure.

    Nodes share folders, and their containers number processes in the same way, so a process id alone is not unique.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, fsync, rename: it exists whole or not at all."""
    with temporary_beside(path) as temporary:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    fsync_path(path.parent)


def lock_at_once(descriptor: int, kind: int) -> bool:
    """Lock an opened file, `LOCK_EX` alone or `LOCK_SH` with others. Return False if others do not let it."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False
