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
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.rank_events import Event

WENT_BACK, RUN_BEGUN, RETIRED = "went_back", "run_begun", "retired"
"""Events about branches and checkpoints. The process of the listeners reads their facts from the ledger."""
_MOST_WAITING = 10_000
"""Events that wait for a process that reads none. Further ones are lost."""
_MARGIN_S = 2.0
"""Extra seconds for the process, past the time that it gives to its listeners."""
_LEAST_S = 60.0
"""Seconds that a process has at least, because the libraries of listeners are imported first. A command ends before."""
_log = logging.getLogger(__name__)


def describe_attempt(point: ResumePoint, plans: Plans, *, world_size: int, nodes: int, folder: Path | None) -> Event:
    """Return the start of an attempt, for listeners. The plans of its leg have been read before."""
    tables = tables_of(Leg.from_json(point.leg), plans)
    names = ("attempt", "step", "head_step", "branch", "went_back")
    start = {"event": "claimed", "resumed_from": point.checkpoint_id, **{name: getattr(point, name) for name in names}}
    return {**start, "tables": tables, "world_size": world_size, "nodes": nodes, "folder": str(folder or "")}


def tables_of(leg: Leg, plans: Plans) -> list[dict[str, Any]]:
    """Return the tables that a leg reads, with the fields of an `InputTable`."""
    return [
        {
            "name": each.name,
            "table": each.table,
            "snapshot_id": each.snapshot_id,
            "rows": plans.row(each.plan_id).live_rows,
        }
        for each in leg.sources
    ]


def report_command(spec: JobSpec | None, event: Event) -> None:
    """Pass an event of a command to the run's listeners, and wait for them."""
    receiver = None if spec is None else spec.event_receiver
    if spec is None or receiver is None or not receiver.takes_commands:
        return
    with ListenerProcess(spec, is_command=True) as process:
        process.send(event)


class ListenerProcess(AbstractContextManager["ListenerProcess"]):
    """The process of one launch's listeners. It starts with the first event, so a node that never leads has none."""

    def __init__(self, spec: JobSpec, *, launched_by: str = "", is_command: bool = False) -> None:
        self._spec = spec
        self._receiver = spec.event_receiver
        self._end_s = 0.0 if self._receiver is None else self._receiver.end_s
        self._head = {"launched_by": launched_by, "is_command": is_command, "end_s": self._end_s, "least_s": _LEAST_S}
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
        deadline = max(time.monotonic() + self._end_s, self._began + _LEAST_S) + _MARGIN_S
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
        if self._receiver is None or self._lines.qsize() >= _MOST_WAITING:
            return
        self._lines.put({"at": time.time(), **event})
        if self._writer is None:
            self._began, program = time.monotonic(), self._receiver.module
            self._writer = threading.Thread(target=self._write, args=(program,), name="listeners", daemon=True)
            self._writer.start()

    def _write(self, program: str) -> None:
        """Start the process, and write events to it until it ends or the queue does."""
        try:
            # Standard output may be the stream of events.
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", program], stdin=subprocess.PIPE, stdout=2, start_new_session=True
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
