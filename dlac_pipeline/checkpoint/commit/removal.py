"""Removal of checkpoint folders after commits. A folder that cannot be removed delays no other, and is tried again.

In: addresses of folders that no run needs. Out: the folders are removed from the store, with local copies and conversions.
Otherwise a warning, once, and another try after the next checkpoint.
"""

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from dlac_pipeline.checkpoint.restore.conversion import discard_conversion
from dlac_pipeline.checkpoint.store import Tiers, attempt_of

AGAIN_AT_ONCE = 16
"""Earlier failures that are tried again after one checkpoint."""
_FAILING_S = 10.0
"""Seconds that failures may take after one checkpoint, because the end of the process waits for them."""

_log = logging.getLogger(__name__)


class Removal:
    """Removal of one attempt. `left_over` finds the folders of earlier attempts, once."""

    def __init__(self, tiers: Tiers, attempt: int, left_over: Callable[[], Iterable[str]]) -> None:
        self._tiers = tiers
        self._files = tiers.files.hurried()
        self._attempt = attempt
        self._left_over = left_over
        self._swept = False
        self._new: deque[str] = deque()
        self._failed: deque[str] = deque()
        """The one that was tried longest ago first."""
        self._warned = False
        self._lock = threading.Lock()
        self._under_way = False

    def begin(self, folders: Iterable[str]) -> None:
        """Remove these folders, then the others that are due, in a thread. A running thread takes them as well."""
        with self._lock:
            self._new.extend(folders)
            if self._under_way or not (self._new or self._failed or not self._swept):
                return
            self._under_way = True
        # Not a daemon: after the last checkpoint of a run no attempt would remove the rest.
        threading.Thread(target=self._work, name="retention").start()

    def now(self) -> None:
        """Remove these folders at once. No thread is running."""
        self._under_way = True
        self._work()

    def _work(self) -> None:
        """New ones first: however many fail, they do not wait for those."""
        failing_s = 0.0 if self._swept else self._sweep()
        again = min(len(self._failed), AGAIN_AT_ONCE)
        while True:
            with self._lock:
                retries = not self._new
                if failing_s >= _FAILING_S or (retries and not again):
                    self._under_way = False
                    return
                folder = (self._failed if retries else self._new).popleft()
            again -= retries
            started = time.monotonic()
            try:
                self._remove(folder)
            except Exception as err:  # the checkpoint is committed: nothing of this may fail it
                self._failed.append(folder)
                failing_s += time.monotonic() - started
                self._warn_once(folder, err)
            else:
                self._warned = self._warned and bool(self._failed)

    def _sweep(self) -> float:
        """Find left-over folders. Return the seconds that failures took."""
        started = time.monotonic()
        try:
            found = list(self._left_over())
        except Exception as err:
            self._warn_once(self._tiers.durable_run(), err)
            return time.monotonic() - started
        with self._lock:
            known = set(self._new)
            self._new.extend(each for each in found if each not in known)
        self._swept = True
        return 0.0

    def _remove(self, folder: str) -> None:
        local = self._tiers.folder("/".join(folder.split("/")[-2:]))
        discard_conversion(local)
        self._files.remove(folder)
        shutil.rmtree(local, ignore_errors=True)
        if (attempt_of(local.parent.name) or self._attempt) < self._attempt:
            with suppress(OSError):
                local.parent.rmdir()  # it is empty when its last checkpoint is gone

    def _warn_once(self, where: str, err: Exception) -> None:
        """Log a failure, once until everything is removed."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "expected to remove checkpoints that no run needs, found at %s: %s; tried again after the next checkpoint, "
                "without another warning",
                where,
                err,
            )
