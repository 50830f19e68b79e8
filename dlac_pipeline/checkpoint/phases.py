"""Durations of phases."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases(dict[str, float]):
    """Seconds by phase, of all threads that were in it."""

    def __init__(self) -> None:
        super().__init__()
        self._adding = threading.Lock()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the time spent inside to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count these to a phase."""
        with self._adding:
            self[name] = self.get(name, 0.0) + seconds
