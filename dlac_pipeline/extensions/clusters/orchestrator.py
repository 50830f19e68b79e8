"""The orchestrator that started this process: reports to it, and the end of the work for it."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from dlac_pipeline.lakehouse.errors import TrainingFailed
from dlac_pipeline.lakehouse.masking import mask_event
from dlac_pipeline.lakehouse.plain_json import strict_json

MARGIN_S = 5.0
"""Extra seconds for a launcher, past the ranks' grace period, when it is not needed any more."""
_ALIVE_EVERY_S = 5.0
_EVENTS: list[TextIO] = []
"""The last one is the stream of events. None: `sys.stdout`."""
_REPORTING = threading.Lock()


def keep_events_apart() -> None:
    """Leave standard output to events from now on. Other output, of libraries and users' transforms, goes to standard error."""
    _EVENTS.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # printed text is written at once, whichever way the process ends


def report(event: dict[str, Any]) -> None:
    """Report an event as one line of JSON. Thread-safe."""
    try:
        with _REPORTING:
            stream = _EVENTS[-1] if _EVENTS else sys.stdout
            stream.write(mask_event(strict_json(event)) + "\n")  # in one piece: on Slurm the nodes share a file
            stream.flush()
    except BrokenPipeError:  # no reader is left, which the end of standard input shows as well
        _EVENTS.append(open(os.devnull, "w"))  # noqa: SIM115 - stays open until the process ends


class Orchestrator:
    """Receiver of a heartbeat every few seconds. When it ends, the work for it ends."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._grace_s = 0.0
        threading.Thread(target=self._report_alive, daemon=True).start()
        threading.Thread(target=self._watch_input, daemon=True).start()

    def on_end(self, stop: Callable[[], None], *, grace_s: float) -> None:
        """Call `stop` when it has ended, and give that this many seconds. Without `stop`, none."""
        self._grace_s, self._stop = grace_s + MARGIN_S, stop

    def _watch_input(self) -> None:
        """Read standard input to its end, which means that the other side is gone. Then exit, in order or not."""
        while os.read(sys.stdin.fileno(), 4096):
            continue
        if self._stop is not None:
            self._stop()
            time.sleep(self._grace_s)
        # It may be busy with something long, a verification perhaps; the ranks die with this process.
        os._exit(TrainingFailed.exit_code)

    def _report_alive(self) -> None:
        """Report that this process runs. The ranks' progress shows that they run."""
        while True:
            time.sleep(_ALIVE_EVERY_S)
            report({"event": "alive"})
