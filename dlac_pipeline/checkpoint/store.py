"""The checkpoint store: a local folder in which nothing is ever overwritten and what is written is durable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from catalog.durable_io import fsync_directory, write_durably
from catalog.errors import StoreUnavailable

MANIFEST = "manifest.json"


def stage_folder(store: str, run: str, *, attempt: int, step: int, nonce: str) -> Path:
    """The folder of one checkpoint: nobody can have used it, the nonce being this launch's own."""
    return Path(store) / run / f"attempt-{attempt:04d}" / f"step-{step:09d}-{nonce}"


def attempt_of(folder: Path) -> int | None:
    """The attempt that staged the checkpoint in `folder`; None for a folder that is not named as one is."""
    number = folder.parent.name.removeprefix("attempt-")
    return int(number) if number.isdigit() else None


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turn the failures of a store that is full, read-only or away into `StoreUnavailable`."""
    try:
        yield
    except OSError as err:
        raise StoreUnavailable(
            f"expected to write to the checkpoint store at {str(folder)!r}, found {type(err).__name__}: {err}; "
            "free or mount it: the last committed checkpoint is untouched"
        ) from err


def check_writable(store: str, run: str) -> None:
    """Prove that the run's folder of the store can be written.

    Raises:
        StoreUnavailable: it cannot.
    """
    folder = Path(store) / run
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        write_durably(probe, b"dlac")
        probe.unlink()


def sync_file(path: Path) -> None:
    """Make a written file and its name durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory(path.parent)


def file_digest(path: Path) -> str:
    """BLAKE3 of a file's content, as hex; uses all cores for large files."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
