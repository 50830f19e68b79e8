"""The process of a run's listeners, each with a thread of its own: `python -m dlac_pipeline.extensions.listeners.main`.

Standard input: the job spec and facts of the launch as one line of JSON, then one event per line, until the process ends.
"""

import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

from dlac_pipeline.extensions.listeners.events import Listener, ProgressMade, RunEvent
from dlac_pipeline.extensions.listeners.settings import ENDPOINTS, LISTENERS, ListenersSpec
from dlac_pipeline.extensions.listeners.translate import EventTranslator
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

_log = logging.getLogger("dlac_pipeline.listeners")
_MOST_WAITING = 1000
"""Events that wait for a slow listener: minutes of progress. With more, the oldest progress events are dropped."""
_POLL_S = 0.5
"""Seconds between two reads of the heartbeats."""


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

    def put(self, event: RunEvent | None) -> None:
        """Add an event, or None as the last one, and return at once. If too many wait, the oldest progress event is dropped."""
        with self._changed:
            if isinstance(event, ProgressMade) and len(self._waiting) >= self._most_waiting:
                self.dropped += 1
                oldest = next((each for each in self._waiting if isinstance(each, ProgressMade)), None)
                if oldest is None:
                    return
                self._waiting.remove(oldest)
            self._waiting.append(event)
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
        except Exception as err:
            self._note_error("did not start, and receives no events", err)
        while (event := self._take()) is not None:
            if listener is not None:
                self._call(listener.on_event, event)
        close = getattr(listener, "close", None)
        if close is not None:
            self._call(close)

    def _take(self) -> RunEvent | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.popleft()

    def _call(self, method: Callable[..., None], *arguments: RunEvent) -> None:
        try:
            method(*arguments)
        except Exception as err:
            self._note_error("raised, and receives further events", err)

    def _note_error(self, what: str, err: Exception) -> None:
        """Count an error. Only the first one is logged."""
        self.errors += 1
        if self.errors == 1:
            trace = None if isinstance(err, BadInput) else err
            _log.warning("listener %r %s: %s", self.name, what, err, exc_info=trace)


def main() -> int:
    """Pass events to listeners until standard input ends. Return the exit status."""
    began = time.monotonic()
    # A scheduler signals every process of a job, and the last events are still to come.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    lines = _lines()
    head = json.loads(next(line for line in lines if line is not None))
    spec = parse_spec(head["spec"], origin="the job spec of the listeners")
    translator = EventTranslator(spec, parent_run=head["launched_by"])
    settings = spec.section(ListenersSpec)
    subscriptions = [
        Subscription(name, partial(make_listener, name, options, spec), most_waiting=_MOST_WAITING)
        for name, options in settings.chosen().items()
        if not (head["is_command"] and name in ENDPOINTS)
    ]
    for line in lines:
        for event in translator.poll() if line is None else translator.translate(json.loads(line)):
            for each in subscriptions:
                each.put(event)
    for last in (*translator.end("lost", reason="the supervisor was lost"), None):
        for each in subscriptions:
            each.put(last)
    deadline = max(time.monotonic() + head["end_s"], began + head["least_s"])
    for each in subscriptions:
        each.join(deadline)
    return 0


def _lines() -> Iterator[bytes | None]:
    """Yield each line of standard input, and None whenever none has arrived for a while."""
    rest = b""
    while True:
        if not select.select([0], [], [], _POLL_S)[0]:
            yield None
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def make_listener(name: str, options: Mapping[str, Any], spec: JobSpec) -> Listener:
    """Make a listener with its options, and with the job spec if it has a parameter `spec`."""
    make = LISTENERS.load(name, setting="listeners")
    given = {"spec": spec} if "spec" in signature(make).parameters else {}
    made: Listener = make(**{**given, **options})
    return made


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # exit handlers and threads of libraries may hang
