"""What the nodes of a cluster's job say, out of the scheduler's logs.

In: the lines of each log, read as often as one likes. Out: events, each once; and last words, of the nodes' latest start only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator

from dlac_pipeline.recover.attempt import Event

_LAST_WORDS = ("ended", "error")


class Log:
    """One log. On Kubernetes it is of one node and begins anew with it; on Slurm all nodes share one, which is appended to."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._heard = 0
        self._first = ""
        self._start: str | None = None
        self._begun = 0
        self.last_words: list[Event] = []
        """How nodes ended, in the order in which they said it."""
        self.last_at = 0.0
        """When the latest of them was heard, by the monotonic clock."""

    @property
    def heard(self) -> bool:
        """Whether there was anything in it."""
        return self._heard > 0

    @property
    def all_ended(self) -> bool:
        """Whether every node that has said anything has said its last words."""
        return len(self.last_words) >= self._begun

    def read(self, lines: Iterable[str], *, last: bool) -> None:
        """Hear what is new; a line whose end is not there yet only if this is the last look."""
        number, begun = 0, ""
        for piece in lines:  # TorchX hands a long log on in pieces of some size, wherever lines end
            line = begun + piece
            begun = "" if line.endswith("\n") else line
            if not begun:
                self._take(number, line)
                number += 1
        if begun and last:
            self._take(number, begun)

    def _take(self, number: int, line: str) -> None:
        if number == 0 and line != self._first:
            self._first, self._heard, self._begun, self.last_words = line, 0, 0, []
        if number >= self._heard:
            self._heard = number + 1
            for event in events_of(line):
                self._hear(event)

    def _hear(self, event: Event) -> None:
        if event["event"] == "node":
            if event["start"] != self._start:
                self._start, self._begun, self.last_words = event["start"], 0, []
            self._begun += 1
            return
        self._begun = max(self._begun, 1)
        if event["event"] in _LAST_WORDS:
            self.last_words.append(event)
            self.last_at = time.monotonic()
        else:
            self._on_event(event)


class Logs:
    """All logs of a job."""

    def __init__(self, count: int, on_event: Callable[[Event], None]) -> None:
        self.each = [Log(on_event) for _ in range(count)]

    @property
    def last_words(self) -> list[Event]:
        """How nodes ended."""
        return [words for log in self.each for words in log.last_words]

    @property
    def heard(self) -> bool:
        """Whether there was anything in any of them."""
        return any(log.heard for log in self.each)

    @property
    def done(self) -> bool:
        """Whether a node said that the run is done."""
        return any(words["event"] == "ended" and words["ending"] != "stopped" for words in self.last_words)

    @property
    def all_ended(self) -> bool:
        """Whether every node that has said anything has said its last words."""
        return all(log.all_ended for log in self.each)

    @property
    def quiet_s(self) -> float:
        """Seconds since the latest last words."""
        return time.monotonic() - max(log.last_at for log in self.each)


def events_of(line: str) -> Iterator[Event]:
    """The events in a line: behind a time stamp, or several that ran together; other lines are not for programs."""
    decoder, at = json.JSONDecoder(), line.find("{")
    while at >= 0:
        try:
            found, behind = decoder.raw_decode(line, at)
        except ValueError:
            behind = at + 1
        else:
            if isinstance(found, dict) and "event" in found:
                yield found
        at = line.find("{", behind)
