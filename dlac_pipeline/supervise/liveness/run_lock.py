"""Lock of a run on one local folder: a courtesy, which the kernel releases with its holder. Safety depends on the fence."""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlac_pipeline.lakehouse.durable_io import lock_at_once, temporary_beside
from dlac_pipeline.lakehouse.errors import RunBusy

_POLL_S = 0.1


def lock_path(local: str, run: str) -> Path:
    """Return the file that a launch locks. It holds the id of the last process that locked it."""
    return Path(local) / run / "launch.lock"


@contextmanager
def run_lock(
    local: str,
    run: str,
    *,
    wait_s: float,
    takeover: bool,
    may_replace: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
) -> Iterator[int]:
    """Hold the run's lock, and yield its descriptor. Wait up to `wait_s` for another holder to exit, then replace its lock
    (`takeover`) or raise `RunBusy`.

    The lock is in the run's folder, which `Tiers.check_writable` has made. `may_replace` is called before the lock of a live
    launch is replaced, and raises to refuse. Once `stop` is set, the call neither waits nor replaces a lock.
    """
    stop = stop or threading.Event()
    path = lock_path(local, run)
    from dlac_pipeline.checkpoint.store import storing  # it imports the job spec, which `dlac status` does not need

    with storing(path.parent):
        descriptor = _acquire(path, wait_s, stop)
        if descriptor is None and takeover and not stop.is_set():
            may_replace()
            descriptor = _replace(path)
    if descriptor is None:
        raise RunBusy(
            f"expected no other launch of run {run!r}, found one alive (process {path.read_text() or 'unknown'}): wait for "
            "it, stop it, or take the run over with --takeover, which fences it off"
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(path: Path, wait_s: float, stop: threading.Event) -> int | None:
    """Return a descriptor that holds the lock, or None if another launch keeps it."""
    deadline = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if _lock(descriptor) and leads_to(path, descriptor):
            return descriptor
        os.close(descriptor)
        if time.monotonic() >= deadline or stop.wait(_POLL_S):
            return None


def _replace(path: Path) -> int:
    """Replace the lock of a holder that does not exit. Return a descriptor of the new lock, which later launches meet."""
    with temporary_beside(path) as temporary:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o644)
        _lock(descriptor)
        temporary.rename(path)
    return descriptor


def _lock(descriptor: int) -> bool:
    """Lock a file and write this process's id into it. Return False if another process holds its lock."""
    if not lock_at_once(descriptor, fcntl.LOCK_EX):
        return False
    write_id(descriptor)
    return True


def write_id(descriptor: int) -> None:
    """Write this process's id into a lock: tools look at that process."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def leads_to(path: Path, descriptor: int) -> bool:
    """Return True if the path still leads to the opened file. A takeover may have replaced it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
