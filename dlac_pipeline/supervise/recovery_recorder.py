"""Recorder of recoveries. The one of a supervisor has a thread, because a wait for the catalog would hide dead ranks."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, write_recovery
from dlac_pipeline.lakehouse.retrying import RETRY_WITHIN_S, retrying
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.failure import Failure
from dlac_pipeline.supervise.incident import Incident, RecoveryOutcome, build_given_up, build_rejoined
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat
from dlac_pipeline.supervise.ranks.local_ranks import Rejoined
from dlac_pipeline.supervise.ranks.rank_events import Event

_LOGGER = logging.getLogger(__name__)
_CLOSE_WITHIN_S = 10.0
"""Seconds for which the end of a launch waits for rows. A catalog that answers needs far less."""
_ATTEMPT_WITHIN_S = 3.0
"""Seconds to wait for the catalog when an attempt ends."""
_STOPPED_WITHIN_S = 2.0
"""Seconds to wait for the catalog after a stop request, whose sender kills this process soon."""

Build = Callable[[Lakehouse], Recovery]
ToEvent = Callable[[Recovery], Event]
Publish = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """A recovery that is to be recorded, and its event once it is."""

    build: Build
    to_event: ToEvent
    publish: Publish


class RecoveryRecorder:
    """The one writer of a run's rows of `recoveries`: it writes at once, and raises the errors of the ledger."""

    def __init__(self, lakehouse: Lakehouse, spec: JobSpec) -> None:
        self._lakehouse = lakehouse
        self._spec = spec
        self._incident: Incident | None = None

    @property
    def in_progress(self) -> bool:
        """True while an attempt recovers from a failure."""
        return self._incident is not None

    def begin(self, point: ResumePoint, failure: Failure) -> None:
        """Begin the recovery from a failure by the attempt of a resume point."""
        self._incident = Incident(self._spec.run, point, failure)

    def observe(self, heartbeats: Sequence[RankHeartbeat], publish: Publish) -> None:
        """Note the phases that the ranks have reached. Record the recovery once all have finished a step."""
        if self._incident is not None and self._incident.observe(heartbeats):
            self.end("resumed", publish)

    def end(self, outcome: RecoveryOutcome, publish: Publish) -> None:
        """Record the end of the recovery in progress, if there is one."""
        incident, self._incident = self._incident, None
        if incident is not None:
            self.record(partial(incident.build_recovery, outcome, time.time()), incident.to_event, publish)

    def record_rejoined(self, rejoined: Rejoined, nonce: str, publish: Publish) -> None:
        """Record that replaced ranks take part again in the attempt of `nonce`."""
        self.record(partial(build_rejoined, rejoined, self._spec, nonce), rejoined.to_event, publish)

    def give_up(self, failure: Failure, attempt: int, publish: Publish, *, reason: str = "") -> None:
        """Record at once that no attempt follows a failed one. An error of the record is only a warning."""
        publish({"event": "given_up", "reason": reason or failure.describe()})
        try:
            write_recovery(self._lakehouse, build_given_up(self._spec.run, failure, attempt, self._lakehouse))
        except DlacError as err:
            publish({"event": "warning", "message": f"giving up was not recorded: {err}"})

    def record(self, build: Build, to_event: ToEvent, publish: Publish) -> None:
        """Write the row that `build` makes from the ledger, and publish its event."""
        recovery = build(self._lakehouse)
        write_recovery(self._lakehouse, recovery, is_new=True)
        publish(to_event(recovery))


class BackgroundRecorder(RecoveryRecorder):
    """Recorder of a supervisor: a thread writes the rows, in the order of the calls. All methods are called in one thread."""

    def __init__(self, lakehouse: Lakehouse, spec: JobSpec, *, stop: threading.Event | None = None) -> None:
        """Once `stop` is set, no read of an unavailable ledger is repeated, and no end waits long."""
        super().__init__(lakehouse, spec)
        self._stop = stop or threading.Event()
        self._closed = threading.Event()
        self._retry = retrying(RETRY_WITHIN_S, stop=self._stop)
        self._waiting: SimpleQueue[_Record | None] = SimpleQueue()
        self._results: SimpleQueue[Event] = SimpleQueue()
        self._unpublished: deque[_Record] = deque()
        self._thread: threading.Thread | None = None

    def record(self, build: Build, to_event: ToEvent, publish: Publish) -> None:
        """Queue a row, and return at once. `build` is repeated while the ledger is unavailable."""
        record = _Record(build=build, to_event=to_event, publish=publish)
        self._unpublished.append(record)
        self._waiting.put(record)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="recoveries", daemon=True)
            self._thread.start()

    def publish_written(self, *, within_s: float = 0.0) -> None:
        """Publish the events of rows that are written within a time, by default until now. Errors are warnings."""
        deadline = time.monotonic() + within_s
        while self._unpublished:
            try:
                event = self._results.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return
            self._unpublished.popleft().publish(event)

    def end_attempt(self) -> None:
        """Forget a recovery in progress, and wait a short time for rows, so that their events precede the next attempt."""
        self._incident = None
        # after a stop request there is no next attempt
        self.publish_written(within_s=0.0 if self._stop.is_set() else _ATTEMPT_WITHIN_S)

    def close(self) -> None:
        """Wait until all rows are written, for 10 s at most, or 2 s after a stop request. Warn of rows that are left."""
        within_s = _STOPPED_WITHIN_S if self._stop.is_set() else _CLOSE_WITHIN_S
        self.publish_written(within_s=within_s)
        self._closed.set()
        self._waiting.put(None)
        while self._unpublished:
            self._unpublished.popleft().publish(_warning(f"found no answer of the catalog for {within_s:.0f} s"))

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None and not self._closed.is_set():
            try:
                recovery = self._retry(record.build, self._lakehouse)
                write_recovery(self._lakehouse, recovery, is_new=True)
                self._results.put(record.to_event(recovery))
            except DlacError as err:
                self._results.put(_warning(str(err)))
            except Exception as err:  # a run must not end because of the record of its recovery
                _LOGGER.exception("the recovery could not be recorded")
                self._results.put(_warning(f"{type(err).__name__}: {err}"))


def _warning(reason: str) -> Event:
    return {"event": "warning", "message": f"the recovery could not be recorded: {reason}"}
