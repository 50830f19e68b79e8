"""Recorder of recoveries: a thread writes their rows, because a supervisor that waits for the catalog notices no dead rank."""

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

_CLOSE_WITHIN_S = 10.0
"""Seconds for which the end of a launch waits for rows. A catalog that answers needs far less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """A recovery that is to be recorded, and its event once it is."""

    build: Callable[[Lakehouse], Recovery]
    to_event: Callable[[Recovery], Event]
    publish: Callable[[Event], None]


class RecoveryRecorder:
    """Writer of rows of `recoveries`, in the order of the calls of `record`. All methods are called in one thread."""

    def __init__(self, lakehouse: Lakehouse, *, stop: threading.Event | None = None) -> None:
        """Once `stop` is set, no read of an unavailable ledger is repeated."""
        self._lakehouse = lakehouse
        self._retry = retrying(RETRY_WITHIN_S, stop=stop)
        self._waiting: SimpleQueue[_Record | None] = SimpleQueue()
        self._results: SimpleQueue[Event | Exception] = SimpleQueue()
        self._unpublished: deque[_Record] = deque()
        self._thread: threading.Thread | None = None

    def record(
        self,
        build: Callable[[Lakehouse], Recovery],
        to_event: Callable[[Recovery], Event],
        publish: Callable[[Event], None],
    ) -> None:
        """Have a recovery written, and return at once. `build` reads the ledger, and is repeated while it is unavailable."""
        record = _Record(build=build, to_event=to_event, publish=publish)
        self._unpublished.append(record)
        self._waiting.put(record)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="recoveries", daemon=True)
            self._thread.start()

    def publish_written(self, *, within_s: float = 0.0) -> None:
        """Publish the events of rows that are written within a time, by default until now. Errors of the catalog are warnings."""
        deadline = time.monotonic() + within_s
        while self._unpublished:
            try:
                result = self._results.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return
            record = self._unpublished.popleft()
            if isinstance(result, Exception):
                raise result
            record.publish(result)

    def close(self) -> None:
        """Wait until all rows are written, for 10 s at most. Warn of the others."""
        self.publish_written(within_s=_CLOSE_WITHIN_S)
        self._waiting.put(None)
        while self._unpublished:
            self._unpublished.popleft().publish(_warning(f"found no answer of the catalog for {_CLOSE_WITHIN_S:.0f} s"))

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                recovery = self._retry(record.build, self._lakehouse)
                write_recovery(self._lakehouse, recovery, is_new=True)
                self._results.put(record.to_event(recovery))
            except DlacError as err:
                self._results.put(_warning(str(err)))
            except Exception as err:  # raised in the thread of the caller
                self._results.put(err)


def _warning(reason: str) -> Event:
    return {"event": "warning", "message": f"the recovery could not be recorded: {reason}"}
