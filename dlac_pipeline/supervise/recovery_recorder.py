"""Recorder of recoveries: a thread writes their rows, because a supervisor that waits for the catalog notices no dead rank."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, write_recovery
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.retry_policy import RETRY_WITHIN_S

_LOGGER = logging.getLogger(__name__)
_CLOSE_WITHIN_S = 10.0
"""Seconds for which the end of a launch waits for rows. A catalog that answers needs far less."""
_ATTEMPT_WITHIN_S = 3.0
"""Seconds to wait for the catalog when an attempt ends."""
_STOPPED_WITHIN_S = 2.0
"""Seconds to wait for the catalog after a stop request, whose sender kills this process soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """A recovery that is to be recorded, and its event once it is."""

    build: Callable[[Lakehouse], Recovery]
    to_event: Callable[[Recovery], Event]
    publish: Callable[[Event], None]


class RecoveryRecorder:
    """Writer of rows of `recoveries`, in the order of the calls of `record`. All methods are called in one thread."""

    def __init__(self, lakehouse: Lakehouse, *, stop: threading.Event | None = None) -> None:
        """Recorder of a supervisor. Once `stop` is set, no read of an unavailable ledger is repeated, and no end waits long."""
        self._lakehouse = lakehouse
        self._stop = stop or threading.Event()
        self._closed = threading.Event()
        self._retry = retrying(RETRY_WITHIN_S, stop=self._stop)
        self._waiting: SimpleQueue[_Record | None] = SimpleQueue()
        self._results: SimpleQueue[Event] = SimpleQueue()
        self._unpublished: deque[_Record] = deque()
        self._thread: threading.Thread | None = None

    def record(
        self,
        build: Callable[[Lakehouse], Recovery],
        to_event: Callable[[Recovery], Event],
        publish: Callable[[Event], None],
    ) -> None:
        """Queue a recovery, and return at once. `build` reads the ledger, and is repeated while the ledger is unavailable."""
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
        """Wait a short time for rows, so that their events precede the next attempt. Do not wait after a stop request."""
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
