"""A supervisor as a process on this node, as an orchestrator starts it, and its events."""

import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from dlac_pipeline.extensions.chaos.strikes import kill_tree, ranks_below
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.ranks.rank_events import EVENTS_FILE, Event, EventReader

_FREQUENT = ("alive", "step", "verifying")
_EVENTS_SHOWN, _LINES_SHOWN = 4, 8


class NodeProcess:
    """A supervisor that serves a request. It ends in order when this process dies."""

    def __init__(self, request: Request, folder: Path, environment: Mapping[str, str]) -> None:
        """`folder` is a new one, for its output."""
        folder.mkdir()
        self.request = request
        self.last: Event = {}
        """The last event, without heartbeats and steps."""
        self._errors = folder / "errors"
        with (folder / EVENTS_FILE).open("wb") as events, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dlac_pipeline.extensions.clusters.supervisor_process"],
                stdin=subprocess.PIPE,
                stdout=events,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self.supervisor = psutil.Process(self._process.pid)
        self._events = EventReader(folder)
        self._recent: deque[Event] = deque(maxlen=_EVENTS_SHOWN)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed
            self._process.stdin.write(request.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. Its last events may be unread."""
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Its exit status, or the negative number of the signal that ended it."""
        return self._process.poll()

    def ranks(self) -> dict[int, psutil.Process]:
        """Return its living ranks by number."""
        return ranks_below(self.supervisor, self.request.spec.run)

    def read_events(self) -> Iterator[Event]:
        """Yield its new events, without heartbeats and steps."""
        for event in self._events.read_new():
            if event["event"] not in _FREQUENT:
                self.last = event
                self._recent.append(event)
                yield event

    def last_lines(self) -> str:
        """Return its last events, and the last lines of its standard error."""
        events = [
            f"{each['event']}: {each.get('message') or each.get('cause') or ''}".rstrip(": ") for each in self._recent
        ]
        lines = self._errors.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
        return "\n".join([*events, *lines])

    def close(self) -> None:
        """Kill it with all processes that it has started, and wait for its end."""
        assert self._process.stdin is not None
        if not self.has_ended:
            psutil.wait_procs(kill_tree(self.supervisor), timeout=10)
        self._process.wait()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
