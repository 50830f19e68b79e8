"""A clock that stops while this process is suspended, so that a paused supervisor does not report other nodes as silent."""

import threading
import time
from collections.abc import Callable
from functools import cache

_READ_EVERY_S = 0.25
_COUNTED_S = 1.0
"""Most seconds that count between two readings."""


class WatchedTime:
    """Seconds since it was made, without the time in which no thread read it. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._watched_s = 0.0

    def __call__(self) -> float:
        """Read it."""
        with self._lock:
            now = self._clock()
            self._watched_s += min(now - self._read_at, _COUNTED_S)
            self._read_at = now
            return self._watched_s


@cache
def watched_time() -> WatchedTime:
    """This process's. A thread reads it, for others wait now and then: for a catalog, for a store that does not answer."""
    found = WatchedTime()

    def read() -> None:
        while True:
            time.sleep(_READ_EVERY_S)
            found()

    threading.Thread(target=read, name="watched time", daemon=True).start()
    return found
