"""Blocks are prepared in background threads, ahead of need, within a byte budget."""

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Prepared = TypeVar("Prepared")
BlockKey = tuple[int, int, int, int, int]
"""(source, pass, key group, block, first slice)."""


@dataclass(frozen=True, slots=True)
class Wanted(Generic[Prepared]):
    """A block that will be needed: its estimated size, and what prepares it."""

    key: BlockKey
    size_bytes: int
    scratch_bytes: int
    """Bytes that a thread also takes to prepare it, which the allocator keeps."""
    prepare: Callable[[], Prepared]
    size_of: Callable[[Prepared], int]


@dataclass(slots=True)
class _Request:
    """A block that is being prepared, or is."""

    wanted: Wanted[Any]
    future: Future[Any]
    _size_bytes: int | None = None

    @property
    def size_bytes(self) -> int:
        """Known where it is prepared, until then estimated."""
        if self._size_bytes is None and self.future.done():
            failed = self.future.cancelled() or self.future.exception() is not None
            self._size_bytes = self.wanted.size_bytes if failed else self.wanted.size_of(self.future.result())
        return self.wanted.size_bytes if self._size_bytes is None else self._size_bytes


class Prefetcher:
    """Preparation of blocks ahead in background threads. Blocks ahead and blocks being read stay within the budget together.

    A block that is needed now is always prepared. One that is requested ahead waits for room. `beside_bytes` returns what
    else counts towards the budget at the time.
    """

    def __init__(self, *, threads: int, budget_bytes: int, beside_bytes: Callable[[], int] = lambda: 0) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._threads = threads
        self._budget_bytes = budget_bytes
        self._beside_bytes = beside_bytes
        self._waiting: OrderedDict[BlockKey, Wanted[Any]] = OrderedDict()
        self._ahead: dict[BlockKey, _Request] = {}
        self._held: dict[BlockKey, int] = {}
        self._scratch_bytes = 0
        self._warned = False
        self.peak_bytes = 0
        """The most that counted towards the budget at a time."""
        self.waited_s = 0.0
        """Seconds for which the reader waited for blocks that were not ready."""

    def ask(self, wanted: Wanted[Any]) -> None:
        """Prepare a block ahead, as soon as the budget allows."""
        self._scratch_bytes = max(self._scratch_bytes, wanted.scratch_bytes)
        self._waiting[wanted.key] = wanted
        self._start_waiting()

    def take(self, wanted: Wanted[Prepared]) -> Prepared:
        """The prepared block, which counts as held until it is released."""
        self._waiting.pop(wanted.key, None)
        request = self._ahead.pop(wanted.key, None) or self._begun(wanted)
        self._held[wanted.key] = wanted.size_bytes
        prepared: Prepared = request.future.result() if request.future.done() else self._waited_for(request.future)
        self._held[wanted.key] = wanted.size_of(prepared)
        used = sum(self._held.values())
        if used > self._budget_bytes:
            self._warn(f"found that the {len(self._held)} blocks being read take {used / 2**20:.0f} MB")
        return prepared

    def settle(self) -> None:
        """Wait until everything that may be prepared ahead by now is prepared."""
        wait([request.future for request in self._ahead.values()])

    def is_ready(self, key: BlockKey) -> bool:
        """Return True if a block that was requested ahead is prepared, and the budget has room for another one like it."""
        request = self._ahead.get(key)
        if request is None or not request.future.done() or request.future.cancelled() or request.future.exception():
            return False
        return self._used() + request.size_bytes <= self._budget_bytes

    def begin(self, key: BlockKey) -> None:
        """Begin to prepare a block that is needed now, whatever the budget."""
        if (wanted := self._waiting.pop(key, None)) is not None:
            self._ahead[key] = self._begun(wanted)

    def shrink(self, key: BlockKey, nbytes: int) -> None:
        """The rest of a block that is being read takes so many bytes."""
        self._held[key] = nbytes
        self._start_waiting()

    def release(self, key: BlockKey) -> None:
        """The block is not read any more."""
        self._held.pop(key, None)
        self._start_waiting()

    def forget(self, key: BlockKey) -> None:
        """The block is neither read nor needed any more."""
        self._waiting.pop(key, None)
        self._ahead.pop(key, None)
        self.release(key)

    def close(self) -> None:
        """Drop all requests and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._waiting.clear()

    def _begun(self, wanted: Wanted[Any]) -> _Request:
        return _Request(wanted, self._pool.submit(wanted.prepare))

    def _waited_for(self, future: Future[Prepared]) -> Prepared:
        started = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waited_s += time.perf_counter() - started

    def _start_waiting(self) -> None:
        used = self._used()
        for wanted in list(self._waiting.values()):
            if used + wanted.size_bytes > self._budget_bytes:
                if not self._ahead:
                    self._warn(f"found that what is read and decoded takes {used / 2**20:.0f} MB")
                return
            del self._waiting[wanted.key]
            self._ahead[wanted.key] = self._begun(wanted)
            used += wanted.size_bytes
            self.peak_bytes = max(self.peak_bytes, used)

    def _used(self) -> int:
        blocks = sum(self._held.values()) + sum(request.size_bytes for request in self._ahead.values())
        used = blocks + self._threads * self._scratch_bytes + self._beside_bytes()
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def _warn(self, found: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"expected what is being read to leave room in {self._budget_bytes / 2**20:.0f} MB, {found}: nothing is decoded "
                "ahead; raise read.budget_mb, lower order.block_slices or order.key_groups, or write smaller row groups",
                stacklevel=3,
            )
