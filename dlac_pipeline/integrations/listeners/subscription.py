"""Subscription of one listener: its thread, and the events that wait for it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from dlac_pipeline.integrations.listeners.events import Listener, ProgressMade, RunEvent

_log = logging.getLogger("dlac_pipeline.listeners")


class Subscription:
    """A listener with a thread of its own. It is made in that thread, because an import of its library may take seconds."""

    def __init__(self, name: str, make: Callable[[], Listener], *, most_waiting: int) -> None:
        self.name = name
        self.dropped = self.errors = 0
        self._make = make
        self._most_waiting = most_waiting
        self._waiting: deque[RunEvent | None] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, event: RunEvent) -> None:
        """Add an event, and return at once. If too many wait, the oldest progress event is dropped."""
        with self._changed:
            if isinstance(event, ProgressMade) and len(self._waiting) >= self._most_waiting:
                self.dropped += 1
                oldest = next((each for each in self._waiting if isinstance(each, ProgressMade)), None)
                if oldest is None:
                    return
                self._waiting.remove(oldest)
            self._waiting.append(event)
            self._changed.notify()

    def close(self) -> None:
        """Let the listener end after the events that wait."""
        with self._changed:
            self._waiting.append(None)
            self._changed.notify()

    def join(self, deadline: float) -> None:
        """Wait until the listener has ended, or until a moment of the monotonic clock. Log how many events it missed."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            left = sum(each is not None for each in self._waiting)
        unfinished = self._thread.is_alive()
        if unfinished or self.dropped or self.errors:
            state = "did not end in time" if unfinished else "ended"
            _log.warning(
                "listener %r %s: %d errors, %d progress events dropped, %d events left",
                *(self.name, state, self.errors, self.dropped, left),
            )

    def _work(self) -> None:
        listener: Listener | None = None
        try:
            listener = self._make()
        except Exception:
            self._note_error("did not start, and receives no events")
        while (event := self._take()) is not None:
            if listener is not None:
                self._call(listener.on_event, event)
        close = getattr(listener, "close", None)
        if close is not None:
            self._call(close)

    def _take(self) -> RunEvent | None:
        with self._changed:
            while not self._waiting:
                self._changed.wait()
            return self._waiting.popleft()

    def _call(self, method: Callable[..., None], *arguments: RunEvent) -> None:
        try:
            method(*arguments)
        except Exception:
            self._note_error("raised, and receives further events")

    def _note_error(self, what: str) -> None:
        """Count an error. Only the first one is logged."""
        self.errors += 1
        if self.errors == 1:
            _log.warning("listener %r %s", self.name, what, exc_info=True)
