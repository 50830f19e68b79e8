"""One launch of a run at a time on one store: a lock that the kernel releases when its holder dies, however it dies.

It is a courtesy that refuses a second launch early and clearly. Safety does not rest on it: the fence does that.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from catalog.errors import RunBusy
from dlac_pipeline.checkpoint.store import storing

_POLL_S = 0.1


@contextmanager
def run_lock(store: str, run: str, *, wait_s: float, takeover: bool) -> Iterator[None]:
    """Hold the run's lock; wait `wait_s` for another holder to leave, then take over without it, or refuse.

    Raises:
        RunBusy: another launch holds it, and `takeover` was not asked for.
    """
    path = Path(store) / run / "launch.lock"
    with storing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        held = _acquire(descriptor, wait_s)
        if not held and not takeover:
            holder = os.pread(descriptor, 100, 0).decode() or "unknown"
            raise RunBusy(
                f"expected no other launch of run {run!r}, found one alive (process {holder}): wait for it, stop it, or "
                "take the run over with --takeover, which fences it off"
            )
        if held:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
