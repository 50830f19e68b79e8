"""Durable writer: an engine's states in, entries of the manifest out. Threads make files durable while others are written."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.manifest import FileEntry
from dlac_pipeline.checkpoint.stage.streamed_file import Frozen, Written, write_state
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

    def __init__(
        self, tiers: Tiers, name: str, *, in_background: bool = False, after: "DurableWriter | None" = None
    ) -> None:
        """`after`: the writer of the rank's last checkpoint, which is committed. `Frozen` files may refer to its files."""
        self._tiers = tiers
        self._name = name
        self._folder = tiers.folder(name)
        self._copied = tiers.store is not None
        # Writing only: threads that others start, as pyarrow does for reading, would inherit the priority for good.
        self._background = ThreadPoolExecutor(1, "writing", initializer=_give_way) if in_background else None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sealing")
        self._sealed: list[tuple[Future[None], FileEntry]] = []
        self._last_folder = self._folder if after is None else after._folder
        self._last = {} if after is None else {entry.path: entry for _, entry in after._sealed if entry.folder}
        self.phases = Phases()
        """Seconds: digest, within writing. Of threads: sync, upload."""

    def save(self, state: Any, path: Path) -> None:
        """Write `state` to `path`, and begin to make it durable. Raise `OSError` if it cannot be written."""
        write, call = self._write, None if self._background is None else self._background.submit
        written, folder = write(state, path) if call is None else call(write, state, path).result()
        self.phases.add("digest", written.digest_s)
        name = str(path.relative_to(self._folder))
        entry = FileEntry(path=name, bytes=written.bytes, digest=written.digest, folder=folder)
        self._sealed.append((self._pool.submit(self._make_durable, path, entry), entry))

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

    def _write(self, state: Any, path: Path) -> tuple[Written, str]:
        """Write a file, or link an equal one of the last checkpoint. Return the folder in the store of one that is `Frozen`."""
        if not isinstance(state, Frozen):
            return write_state(state, path, direct=not self._copied), ""
        last = self._last.get(name := str(path.relative_to(self._folder)))
        if last is not None and (found := write_state(state, None)).digest == last.digest:
            with suppress(OSError):  # it is written again, as in a file system without hard links
                os.link(self._last_folder / name, path)
                return found, last.folder if self._copied else self._name
        return write_state(state, path, direct=not self._copied), self._name

    def _make_durable(self, path: Path, entry: FileEntry) -> None:
        if self._copied:  # the local copy needs no fsync, because it is used only if its digests match
            if entry.folder in ("", self._name):
                with self.phases.of("upload"):
                    self._tiers.put(path, self._name, entry.path)
            return
        with self.phases.of("sync"):
            fsync_path(path)
            fsync_path(path.parent)


def _give_way() -> None:
    """Let the processor's other threads go first."""
    if sys.platform == "linux":  # elsewhere this would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
