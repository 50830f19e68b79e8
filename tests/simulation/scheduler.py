"""A deterministic scheduler: processes are generators that yield the time they wait. One seed is one schedule."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")
Process = Generator[float, None, T]
"""A process. It yields how long it waits."""


class Life:
    """The lifetime of a node, of its ranks, or of some of them. Processes on it end with it, and with the one around it."""

    __slots__ = ("_around", "_ended")

    def __init__(self, around: Life | None = None) -> None:
        self._around, self._ended = around, False

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._ended or (self._around is not None and self._around.ended)

    @ended.setter
    def ended(self, ended: bool) -> None:
        self._ended = ended


class Scheduler:
    """The clock, the random numbers and the log of one schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._log: list[tuple[float, str, tuple[Any, ...]]] = []

    def call(self, delay: float, action: Callable[[], None]) -> None:
        """Call `action` after `delay`."""
        self._scheduled += 1
        heappush(self._queue, (self.now + delay, self._scheduled, action))

    def spawn(self, process: Process[None], life: Life, delay: float = 0.0) -> None:
        """Start a process that ends with `life`."""
        self.call(delay, partial(self._resume, process, life))

    def _resume(self, process: Process[None], life: Life) -> None:
        if life.ended:
            process.close()
            return
        delay = next(process, None)
        if delay is not None:
            self.call(delay, partial(self._resume, process, life))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Run the schedule up to a time, or until it is over."""
        while self._queue and self._queue[0][0] <= until and not is_over():
            self.now, _, action = heappop(self._queue)
            action()

    def note(self, text: str, *facts: object) -> None:
        """Log an event. The text is formatted only if a person reads it."""
        self._log.append((self.now, text, facts))

    def events(self) -> list[str]:
        """Return the log, one line per event."""
        return [f"{time:7.2f}  {text.format(*facts)}" for time, text, facts in self._log]
