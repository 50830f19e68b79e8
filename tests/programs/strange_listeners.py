"""Listeners of another distribution: one records, and all others misbehave."""

import ctypes
import dataclasses
import json
from pathlib import Path

from dlac_pipeline.extensions.listeners.events import RunEvent


class Records:
    """Appends each event to a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_event(self, event: RunEvent) -> None:
        """Append an event."""
        self._append({"kind": type(event).__name__, **dataclasses.asdict(event)})

    def close(self) -> None:
        """Append a last line."""
        self._append({"kind": "closed"})

    def _append(self, facts: dict[str, object]) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps(facts) + "\n")


class Raises:
    """Raises at each event."""

    def on_event(self, event: RunEvent) -> None:
        """Raise."""
        raise RuntimeError(f"no room for {type(event).__name__}")


class HoldsLock:
    """Never returns, and keeps the interpreter's lock: no other thread of its process runs."""

    def on_event(self, event: RunEvent) -> None:
        """Wait for ever in C."""
        ctypes.PyDLL(None).sleep(10_000)
