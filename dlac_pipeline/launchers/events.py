"""The events of a job's nodes, read from the logs that the scheduler keeps.

In: pieces of each log. Out: each event once, and the last event of each node in the latest start of its job.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dlac_pipeline.supervise.ranks.rank_events import Event

_LAST = ("ended", "error")


@dataclass
class _Log:
    """One log: on Slurm all nodes write the same one, on Kubernetes each node has its own."""

    start: str | None = None
    nodes: int = 0
    last_events: list[Event] = field(default_factory=list)
    rest: str = ""
    """The beginning of a line whose end is not written yet."""


class NodeEvents:
    """The events of all nodes of a job."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._logs: dict[str, _Log] = {}
        self._last_at = 0.0

    def read(self, log: str, text: str) -> None:
        """Report the events in the next piece of a log."""
        place = self._logs.setdefault(log, _Log())
        *lines, place.rest = (place.rest + text).split("\n")
        for line in lines:
            for event in events_in(line):
                self._take(place, event)

    def _take(self, log: _Log, event: Event) -> None:
        if event["event"] == "node":
            if event["start"] != log.start:
                log.start, log.nodes, log.last_events = event["start"], 0, []
            log.nodes += 1
            return
        log.nodes = max(log.nodes, 1)
        if event["event"] in _LAST:
            log.last_events.append(event)
            self._last_at = time.monotonic()
        else:
            self._on_event(event)

    @property
    def last_events(self) -> list[Event]:
        """The ends of nodes."""
        return [event for log in self._logs.values() for event in log.last_events]

    @property
    def is_done(self) -> bool:
        """True if a node reported that the run needs no more training."""
        return any(event["event"] == "ended" and event["ending"] != "stopped" for event in self.last_events)

    @property
    def all_ended(self) -> bool:
        """True if each node that reported anything has also reported its end."""
        return all(len(log.last_events) >= log.nodes for log in self._logs.values())

    @property
    def quiet_s(self) -> float:
        """Seconds since a node reported its end."""
        return time.monotonic() - self._last_at


def events_in(line: str) -> Iterator[Event]:
    """Yield the events of a line, which may begin with a time stamp or hold several events without a line break."""
    decoder, at = json.JSONDecoder(), line.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(line, at)
        except ValueError:
            end = at + 1
        else:
            if isinstance(found, dict) and "event" in found:
                yield found
        at = line.find("{", end)
