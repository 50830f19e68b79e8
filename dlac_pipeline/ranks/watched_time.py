"""Time in which somebody looked on. A process that was stopped and goes on, or whose machine was suspended, has heard nothing
meanwhile: what passed then is nobody's silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_COUNTED_S = 1.0
"""Of the time between two readings no more counts; who watches reads many times a second."""


class WatchedTime:
    """A clock in seconds, read by whoever watches, from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._watched_s = 0.0

    def __call__(self) -> float:
        """Seconds since the first reading in which somebody looked on."""
        with self._lock:
            now = self._clock()
            self._watched_s += min(now - self._read_at, _COUNTED_S)
            self._read_at = now
            return self._watched_s
