"""Process of a run's listeners: events go in, and nothing comes back to training. See docs/design/0012-extensions.md."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue

from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.rank_events import Event

_MOST_WAITING = 10_000
"""Events that wait for a process that reads none. Further ones are lost."""
_PROGRAM = "dlac_pipeline.extensions.listeners.main"
_END_S = 5.0
"""Seconds for the last events: nodes of a cluster's job are killed ten seconds after their deadline."""
_MARGIN_S = 2.0
"""Extra seconds for the process, past the time that it gives to its listeners."""
_LEAST_S = 60.0
"""Seconds that a process has at least, because the libraries of listeners are imported first. A command ends before."""
_log = logging.getLogger(__name__)


class ListenerProcess(AbstractContextManager["ListenerProcess"]):
    """The process of one launch's listeners. It starts with the first event, so a node that never leads has none."""

    def __init__(self, spec: JobSpec, *, launched_by: str = "", is_command: bool = False) -> None:
        self._spec = spec
        self._head = {"launched_by": launched_by, "is_command": is_command, "end_s": _END_S, "least_s": _LEAST_S}
        self._began = 0.0
        self._lines: SimpleQueue[Event | None] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: threading.Thread | None = None

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        """Report the error that ends the launch, if any. End the process after its own time at the latest."""
        if self._writer is None:
            return
        self.send({"event": "closed"} if err is None else {"event": "error", "message": f"{type(err).__name__}: {err}"})
        self._lines.put(None)
        deadline = max(time.monotonic() + _END_S, self._began + _LEAST_S) + _MARGIN_S
        self._writer.join(deadline - time.monotonic())
        process = self._process
        if process is None:
            return
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning("the listeners of run %r did not end in time, and are killed", self._spec.run)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def send(self, event: Event) -> None:
        """Pass on an event of the leader, and return at once."""
        if self._lines.qsize() >= _MOST_WAITING:
            return
        self._lines.put({"at": time.time(), **event})
        if self._writer is None:
            self._began = time.monotonic()
            self._writer = threading.Thread(target=self._write, name="listeners", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        """Start the process, and write events to it until it ends or the queue does."""
        try:
            # Standard output may be the stream of events.
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM], stdin=subprocess.PIPE, stdout=2, start_new_session=True
            )
            assert process.stdin is not None
            with process.stdin as stream:
                head: Event | None = {"spec": self._spec.model_dump(mode="json"), **self._head}
                while head is not None:
                    stream.write(json.dumps(head, default=str).encode() + b"\n")
                    stream.flush()
                    head = self._lines.get()
        except (OSError, ValueError) as err:
            _log.warning("the listeners of run %r receive no more events: %s", self._spec.run, err)
