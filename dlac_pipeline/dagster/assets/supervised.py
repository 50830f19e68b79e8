"""Supervisor process of a Dagster run: its events arrive while it trains, and it never outlives the run.

The supervisor leads a new session, and ends in order when its standard input closes, however this process dies. A killed
supervisor is started again here, so that the recovery needs no sensor of Dagster's.
"""

import contextlib
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.launch_spec import LISTENS_S

Event = dict[str, Any]
MARGIN_S = 10.0
"""Extra seconds for the supervisor, past the ranks' time to exit."""
_ASKING_S = 30.0
"""And where it follows a cluster's job, on top of the time for which it listens to nodes: schedulers answer when they like."""
_LOOK_S = 1.0
_log = logging.getLogger(__name__)
SILENT_S = 120.0
"""Seconds without output, after which a supervisor is given up."""
_DIED = "SupervisorDied"
_OLD_LAUNCH_S = 30.0
"""Seconds for the ranks of a killed supervisor to end: they hold the lock of the run's folder no longer then."""


def supervise_run(
    request: Request, on_event: Callable[[Event], None], *, on_asking: Callable[[], None] = lambda: None
) -> tuple[Event, Request]:
    """Run supervisors as `supervise_launch` does, until one reports how the run ended. Return that event and its request.

    A supervisor of this node that was killed is replaced at once if it had committed a checkpoint. After any other death
    Dagster's sensors decide, which count recoveries without progress.
    """
    while True:
        seen: dict[str, Event] = {}  # the last event of each kind

        def pass_on(event: Event, seen: dict[str, Event] = seen) -> None:
            seen[event["event"]] = event
            on_event(event)

        last = supervise_launch(request, pass_on, on_asking=on_asking)
        if last.get("kind") != _DIED or "checkpoint" not in seen or request.spec.launch.on != "here":
            return last, request
        warning = f"the supervisor died ({last['message']}): another one starts"
        _pass_on(on_event, {"event": "warning", "message": warning})
        replaced = seen.get("attempt", {}).get("attempt", 0)
        update = {"replaces": replaced, "recovers": request.launched_by, "takeover": True, "wait_s": _OLD_LAUNCH_S}
        update |= {"noticed_by": "Dagster run", "noticed_at": time.time(), "plan_ids": (), "repin": False}
        request = request.model_copy(update=update)


def supervise_launch(
    request: Request,
    on_event: Callable[[Event], None],
    *,
    on_asking: Callable[[], None] = lambda: None,
    silent_s: float = SILENT_S,
) -> Event:
    """Run the supervisor and pass its events on as they arrive. Return the last one, `ended` or `error`.

    After an interruption, it calls `on_asking`, asks the supervisor to stop and passes on its further events, marked `asked`.
    After a second one, it kills the supervisor. An event that cannot be passed on is lost, and training continues.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "dlac_pipeline.extensions.clusters.supervisor_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    voice, launch = Voice(process), request.spec.launch
    last: Event = {}
    try:
        assert process.stdin is not None
        process.stdin.write(request.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        for last in voice.events(silent_s=silent_s):
            _pass_on(on_event, last)
        if voice.open:
            return {"event": "error", "kind": "SupervisorSilent", "message": f"it wrote no output for {silent_s:.0f} s"}
        if last.get("event") not in ("ended", "error"):
            return {"event": "error", "kind": _DIED, "message": f"exit status {process.wait()}"}
        return last
    finally:
        try:
            if voice.open:
                on_asking()
                process.send_signal(signal.SIGTERM)
                extra_s = MARGIN_S if launch.on == "here" else LISTENS_S + _ASKING_S
                for event in voice.events(within_s=launch.deadline_s + extra_s):
                    _pass_on(on_event, {**event, "asked": True})
        finally:
            _kill(process)


def _pass_on(on_event: Callable[[Event], None], event: Event) -> None:
    """Show an event. An outage of Dagster's storage does not end a training run. An interruption does."""
    try:
        on_event(event)
    except Exception as err:
        _warn("the event %s could not be shown, training continues: %s", event["event"], err)


def _warn(message: str, *facts: object) -> None:
    with contextlib.suppress(Exception):  # Dagster may store log lines in the storage that is unavailable
        _log.warning(message, *facts)


class Voice:
    """Output of a supervisor. Its heartbeats are noted, and not passed on."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._rest = b""
        self.open = True
        """True if more output may come."""

    def events(self, *, silent_s: float = math.inf, within_s: float = math.inf) -> Iterator[Event]:
        """Yield its events until it has ended, has been silent for `silent_s`, or `within_s` have passed.

        Then its output is read once more, because the receiver of the events may have taken all of that time.
        """
        began = received = time.monotonic()
        while self.open:
            late = time.monotonic() >= began + within_s
            if select.select([self._descriptor], [], [], 0.0 if late else _LOOK_S)[0]:
                data = os.read(self._descriptor, 65536)
                self.open = bool(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                found = (event for line in lines if (event := _event_of(line)) is not None)
                yield from (event for event in found if event["event"] != "alive")
                received = time.monotonic()
            elif time.monotonic() >= received + silent_s:
                return
            if late:
                return


def _event_of(line: bytes) -> Event | None:
    """Return the event of a line, or None, with a warning, for other text: printed text does not end training."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and "event" in event:
            return event
    _warn("expected an event of the supervisor, found %r", line.decode(errors="replace"))
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the rest of it with SIGKILL. Its ranks die with it."""
    if process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)  # it has reported its end and is exiting
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
