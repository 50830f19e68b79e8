"""Connection of a node to the store of its run: a thread talks to it, so that a silent network does not block the node."""

import threading
from collections.abc import Callable
from contextlib import suppress

from dlac_pipeline.elastic.ranks.watched_time import watched_time
from dlac_pipeline.elastic.sealed_store import SealedStore

_BRISK_FOR_S = 5.0
"""Time after the last news in which a node beats as often as if it waited."""
_EVERY_S = 0.25
_QUIET_S = 1.0
_MANY_NODES = 256
"""Nodes up to which the leader reads all of them every time. Of more it reads as many per second."""
_LAST_EXCHANGE_S = 1.0


class StoreConnection:
    """Connection to the store: its exchanges, how often they happen, and since when the store is silent."""

    def __init__(self, store: SealedStore, *, timeout_s: float, now: Callable[[], float] | None = None) -> None:
        """`timeout_s`: silence after which a node counts as lost. No exchange happens before `start`."""
        self.store = store
        self.timeout_s = timeout_s
        self.now = now or watched_time()
        self.lock = threading.RLock()
        """Held while knowledge of the run changes, or is read by another thread."""
        self.answered_at = self.now()
        """Time at which the store last answered a whole exchange."""
        self.looks = 0
        """Number of whole exchanges. Knowledge of other nodes changes with it alone."""
        self._brisk_until = self.now() + _BRISK_FOR_S
        self._leaves = False
        self._closing = threading.Event()
        self._hurries = threading.Event()
        self._has_news = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, exchange: Callable[[], None], *, depart: Callable[[], None], pause_s: Callable[[], float]) -> None:
        """Call `exchange` from a thread with pauses, and at last `depart` if the node leaves."""
        self._thread = threading.Thread(
            target=self._run, args=(exchange, depart, pause_s), name="heartbeat", daemon=True
        )
        self._thread.start()

    @property
    def is_silent(self) -> bool:
        """True if the store has not answered for too long."""
        return self.has_passed(self.answered_at)

    def has_passed(self, moment: float) -> bool:
        """Return True if a moment is longer ago than a node may be silent."""
        return moment < self.now() - self.timeout_s

    def hurry(self) -> None:
        """Let the next exchange begin at once."""
        self._hurries.set()

    def report_news(self) -> None:
        """Wake the reader of news, and beat often for a while."""
        self._brisk_until = self.now() + _BRISK_FOR_S
        self._has_news.set()

    def wait_for_news(self, within_s: float) -> None:
        """Wait until there is something new for this node, so long at most."""
        self._has_news.wait(within_s)
        self._has_news.clear()

    def pause_of_leader_s(self, nodes: int) -> float:
        """Return the seconds between two exchanges of a leader that reads so many nodes."""
        return _EVERY_S * max(1.0, nodes / _MANY_NODES)

    def pause_s(self, *, trains: bool) -> float:
        """Return the seconds between two exchanges of a node that does not lead. While nodes train it may beat seldom."""
        is_quiet = trains and self.now() > self._brisk_until
        return min(_QUIET_S, self.timeout_s / 10) if is_quiet else _EVERY_S

    def close(self, *, leaves: bool) -> None:
        """Stop the exchanges. A node that leaves departs first. A thread that hangs is abandoned."""
        self._leaves = leaves
        self._closing.set()
        self._hurries.set()
        if self._thread is not None:
            self._thread.join(_LAST_EXCHANGE_S if leaves else 0)

    def _run(self, exchange: Callable[[], None], depart: Callable[[], None], pause_s: Callable[[], float]) -> None:
        while not self._closing.is_set():
            self._hurries.clear()
            with suppress(RuntimeError, OSError, KeyError, TypeError, ValueError):  # `is_silent` reports it
                exchange()
                with self.lock:
                    self.answered_at = self.now()
                    self.looks += 1
            self._hurries.wait(pause_s())
        if self._leaves:
            with suppress(RuntimeError, OSError):
                depart()
