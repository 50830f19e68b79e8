"""Events of an attempt that rank 0 writes to its launch folder, and the supervisor and other programs read."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from dlac_pipeline.lakehouse.masking import mask_event

Event = dict[str, Any]
"""An event for listeners: its name under `event`, and facts of that event."""
Ending = Literal["finished", "caught_up", "stopped", "left"]
"""The end of an attempt in order, as rank 0 reports it."""
ENDINGS: Sequence[Ending] = get_args(Ending)
EVENTS_FILE = "events.jsonl"
_ENTERED_LEG = "leg.json"


class EventWriter:
    """Writer of events for the supervisor. Only rank 0 writes them, and nothing is written without a launch folder."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._rank = rank
        self.receive: Callable[[Event], None] | None = None
        """Receives each event as well."""
        self.open(folder)

    def open(self, folder: Path | None) -> None:
        """Write to this launch folder from now on."""
        self._path = None if folder is None or self._rank != 0 else folder / EVENTS_FILE

    def write(self, event: Mapping[str, object]) -> None:
        """Append one event."""
        if self.receive is not None:
            self.receive(dict(event))
        if self._path is not None:
            with self._path.open("a") as stream:
                stream.write(mask_event(json.dumps({**event, "at": time.time()})) + "\n")

    def note_leg(self, leg: str) -> None:
        """Record the leg that the ranks have entered in place, as JSON."""
        if self._path is not None:
            part = self._path.with_name(f"{_ENTERED_LEG}.part")
            part.write_text(leg)
            part.rename(self._path.with_name(_ENTERED_LEG))


class EventReader:
    """Reader of the events of an attempt, each of them once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS_FILE
        self._bytes_read = 0

    def read_new(self) -> Iterator[Event]:
        """Yield the events that were completed since the last call."""
        if self._path.exists():
            with self._path.open() as stream:
                stream.seek(self._bytes_read)
                for line in stream:
                    if not line.endswith("\n"):
                        break
                    self._bytes_read += len(line.encode())
                    yield json.loads(line)


def read_total_steps(folder: Path) -> int | None:
    """Return the last step of the run, as the ranks recorded it when they began to train its leg, or None if unknown."""
    return next((event["total_steps"] for event in reversed(_read_events(folder, ("training", "leg")))), None)


def read_entered_leg(folder: Path) -> str | None:
    """Return the leg that the ranks have entered in place, or None if they train that of the start."""
    path = folder / _ENTERED_LEG
    return path.read_text() if path.exists() else None


def read_ending(folder: Path) -> Ending | None:
    """Return how the script of an attempt ended its run, as rank 0 recorded it, or None if it did not end in order."""
    events = _read_events(folder, ("training", *ENDINGS))
    return None if not events else ending_of(events[-1])


def ending_of(event: Event) -> Ending | None:
    """Return the ending that an event reports, or None."""
    return next((ending for ending in ENDINGS if ending == event["event"]), None)


def _read_events(folder: Path, kinds: Sequence[str]) -> list[Event]:
    """Return the events of these kinds that rank 0 wrote. Empty if the folder cannot be read."""
    try:
        lines = (folder / EVENTS_FILE).read_text().splitlines(keepends=True)
    except OSError:
        return []
    wanted = [f'"event": "{kind}"' for kind in kinds]
    return [json.loads(line) for line in lines if line.endswith("\n") and any(each in line for each in wanted)]
