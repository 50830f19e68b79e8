"""Sandbox: a temporary folder that is removed afterwards. The next sandbox removes one whose owner was killed.

The owner holds a lock in the folder. The kernel releases it when the owner dies.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "dlac-rehearsal-"
_LOCK = "owner.lock"


@contextmanager
def sandbox(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder below `parent`, or below the system's folder for temporary files. Remove the folder afterwards."""
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    remove_left_overs(parent)
    folder, lock = _make_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left_overs(parent: Path) -> None:
    """Remove the folders in `parent` whose owner has died. Folders of other users stay."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _make_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder and the lock in it. Make another one if a process removed the folder before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(folder / _LOCK), os.fstat(lock)):
                return folder, lock
        os.close(lock)
