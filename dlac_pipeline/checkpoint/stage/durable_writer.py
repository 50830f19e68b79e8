"""Durable writer: an engine's states in, entries of the manifest out. Threads make files durable while others are written."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.manifest import FileEntry
from dlac_pipeline.checkpoint.stage.streamed_file import write_state
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.lakehouse.durable_io import fsync_path

_THREADS = 4
_NICE = 10
"""Niceness of writing in the background: low, but a busy node still gets to it."""


class Phases(dict[str, float]):
    """Seconds by phase, of all threads that were in it."""

    def __init__(self) -> None:
        super().__init__()
        self._adding = threading.Lock()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the time spent inside to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count these to a phase."""
        with self._adding:
            self[name] = self.get(name, 0.0) + seconds


class DurableWriter:
    """The files of one rank in the checkpoint `name`. `in_background`: the write yields to training, which continues."""

    def __init__(self, tiers: Tiers, name: str, *, in_background: bool = False) -> None:
        self._tiers = tiers
        self._name = name
        self._folder = tiers.folder(name)
        self._copied = tiers.store is not None
        # Writing only: threads that others start, as pyarrow does for reading, would inherit the priority for good.
        self._background = ThreadPoolExecutor(1, "writing", initializer=_give_way) if in_background else None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sealing")
        self._sealed: list[tuple[Future[None], FileEntry]] = []
        self.phases = Phases()
        """Seconds: digest, within writing. Of threads: sync, upload."""

    def save(self, state: Any, path: Path) -> None:
        """Write `state` to `path`, and begin to make it durable. Raise `OSError` if it cannot be written."""
        write = partial(write_state, state, path, direct=not self._copied)
        written = write() if self._background is None else self._background.submit(write).result()
        self.phases.add("digest", written.digest_s)
        name = str(path.relative_to(self._folder))
        durable = self._pool.submit(self._make_durable, path, name)
        self._sealed.append((durable, FileEntry(path=name, bytes=written.bytes, digest=written.digest)))

    def finish(self) -> list[FileEntry]:
        """Return the entries of all files, which are durable now. Raise `OSError` or `StoreUnavailable` if one is not."""
        try:
            for durable, _ in self._sealed:
                durable.result()
            return [entry for _, entry in self._sealed]
        finally:
            self.close()

    def close(self) -> None:
        """End the threads. Files that are not sealed by now never are."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._background is not None:
            self._background.shutdown()

    def _make_durable(self, path: Path, name: str) -> None:
        if self._copied:  # the local copy needs no fsync, because it is used only if its digests match
            with self.phases.of("upload"):
                self._tiers.put(path, self._name, name)
            return
        with self.phases.of("sync"):
            fsync_path(path)
            fsync_path(path.parent)


def _give_way() -> None:
    """Let the processor's other threads go first."""
    if sys.platform == "linux":  # elsewhere this would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
