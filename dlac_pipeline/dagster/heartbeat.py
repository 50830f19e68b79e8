"""Heartbeat of a Dagster run's process, for a sensor that finds runs whose process is gone, and the end of that process.

Heartbeats are in Dagster's key-value storage: run tags are written all at once, and two writers can lose each other's.
"""

import json
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

import dagster as dg
import psutil

from dlac_pipeline.elastic.ranks.processes import is_running
from dlac_pipeline.lakehouse.masking import mask_secrets

BEAT_EVERY_S = 5.0
_HEARD_AFTER_BEATS = 2
"""Dagster's own interruption must come first: a second one would kill the trainer at its last checkpoint."""
_TO_END = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE)
"""Status of a run that must end although its process sends heartbeats: another process has set it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeartbeat:
    """The last heartbeat of a run's process."""

    machine: str
    pid: int
    started_at: float
    """Creation of the process, in seconds since the epoch. It identifies a process whose id is used again."""
    mark: str
    """A new value in every heartbeat. The time without a new one counts, because clocks of two nodes are never compared."""

    @property
    def is_here(self) -> bool:
        """True if the process is on this node."""
        return self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """True if the process has ended. Only for a process of this node."""
        return not is_running(self.pid, started_by=self.started_at)


class Heartbeat:
    """Beats for a run from now on, in the name of a process, until it is closed or this process dies."""

    def __init__(self, instance: dg.DagsterInstance, run_id: str, *, process: psutil.Process | None = None) -> None:
        """`process` is the process to observe. Unset: this one, which is interrupted when the run must end."""
        self._instance = instance
        self._run_id = run_id
        self._process = process or psutil.Process()
        self._interrupted = process is not None
        """True if this process has been interrupted already, or does not belong to the run. It is not interrupted again."""
        self._seen_to_end = 0
        self._closed = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. The run is about to report its end."""
        self._closed.set()
        self._thread.join()

    def was_interrupted(self) -> None:
        """Note that this process has been interrupted and is ending."""
        self._interrupted = True

    def _keep_beating(self) -> None:
        while not self._closed.wait(BEAT_EVERY_S):
            try:
                self._beat()
                self._listen()
            except Exception as err:
                with suppress(Exception):  # Dagster may store log lines in the same storage
                    message = mask_secrets(str(err))
                    _log.warning("the storage of Dagster takes no heartbeat, it is tried again: %s", message)

    def _beat(self) -> None:
        process = self._process
        mark, started_at = secrets.token_hex(4), process.create_time()
        beat = RunHeartbeat(machine=_machine(), pid=process.pid, started_at=started_at, mark=mark)
        self._instance.daemon_cursor_storage.set_cursor_values({_key(self._run_id): json.dumps(asdict(beat))})

    def _listen(self) -> None:
        """Interrupt this process, once, as Dagster does, if the run is to end and Dagster's own interruption did not come."""
        run = None if self._interrupted else self._instance.get_run_by_id(self._run_id)
        self._seen_to_end = self._seen_to_end + 1 if run is not None and run.status in _TO_END else 0
        if run is None or self._seen_to_end < _HEARD_AFTER_BEATS or self._interrupted:
            return
        self._interrupted = True
        os.kill(os.getpid(), signal.SIGINT)
        _log.warning("the run is %s, and its process was not interrupted: DLAC interrupts it", run.status.value)


def beats_of(instance: dg.DagsterInstance, run_ids: Iterable[str]) -> dict[str, RunHeartbeat]:
    """The last heartbeat of each of these runs that has sent one."""
    keys = {_key(run_id): run_id for run_id in run_ids}
    found = instance.daemon_cursor_storage.get_cursor_values(set(keys)) if keys else {}
    return {keys[key]: RunHeartbeat(**json.loads(value)) for key, value in found.items()}


def _key(run_id: str) -> str:
    return f"dlac/heartbeat/{run_id}"


def _machine() -> str:
    """The name of this node and of its container: the scope of a process id."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
