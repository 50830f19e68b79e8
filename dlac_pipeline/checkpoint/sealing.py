"""From files that an engine wrote to entries of the manifest: durable in the store, and digested.

Files are sealed by threads while the engine writes the next ones: digests cost little beside the disk. A copy that lies
before the store needs no fsync: it is used only where its digests hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from catalog.durable_io import fsync_directory
from dlac_pipeline.checkpoint.engines import failed_write
from dlac_pipeline.checkpoint.files import StoreFiles, below, file_digest, sync_file
from dlac_pipeline.checkpoint.manifest import FileEntry
from dlac_pipeline.checkpoint.phases import Phases
from dlac_pipeline.checkpoint.store import storing

_THREADS = 4


class Sealer:
    """The files of one rank in a checkpoint's `folder`; `store` is the address of its copy, None for a folder in the store."""

    def __init__(self, folder: Path, files: StoreFiles, store: str | None) -> None:
        self._folder = folder
        self._files = files
        self._store = store
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sealing")
        self._sealed: list[tuple[Future[None], Future[FileEntry]]] = []
        self.phases = Phases()
        """Seconds of threads: sync, digest, upload."""

    def seal(self, path: Path) -> None:
        """`path` is written: begin to seal it."""
        store = self._store
        durable = self._pool.submit(self._sync, path) if store is None else self._pool.submit(self._upload, path, store)
        self._sealed.append((durable, self._pool.submit(self._digested, path)))

    def finish(self) -> list[FileEntry]:
        """The entries of all files, which are durable now.

        Raises:
            OSError: a file is not.
            StoreUnavailable: it could not be copied.
        """
        try:
            for durable, _ in self._sealed:
                durable.result()
            return [entry.result() for _, entry in self._sealed]
        finally:
            self.close()

    def close(self) -> None:
        """End the threads; what is not sealed by now never is."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _sync(self, path: Path) -> None:
        with self.phases.of("sync"):
            sync_file(path)
            fsync_directory(path.parent)

    def _upload(self, path: Path, store: str) -> None:
        with self.phases.of("upload"):
            self._files.put(path, below(store, str(path.relative_to(self._folder))))

    def _digested(self, path: Path) -> FileEntry:
        with self.phases.of("digest"):
            digest = file_digest(path)
        return FileEntry(path=str(path.relative_to(self._folder)), bytes=path.stat().st_size, digest=digest)


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Turn failures to write, torch's own among them, into `StoreUnavailable`."""
    with storing(folder):
        try:
            yield
        except RuntimeError as err:
            raise failed_write(err) from err
