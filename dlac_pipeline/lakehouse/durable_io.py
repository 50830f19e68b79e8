"""File I/O for a local warehouse that survives a power cut: pyiceberg does not fsync what it writes, and a catalog names it."""

import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyarrow.fs import LocalFileSystem
from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT, Properties

from dlac_pipeline.lakehouse.iceberg.relocation import Relocation, raw_path


def fsync_path(path: str | Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder_durably(folder: Path) -> None:
    """Make a folder and all missing folders above it, and make their names durable. Below a file none can be made."""
    missing = [each for each in (folder, *folder.parents) if not (each.is_dir() if each == folder else each.exists())]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        fsync_path(each.parent)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a unique name beside `path`, for a file that becomes `path` when it is whole. It is removed on failure.

    Nodes share folders, and their containers number processes in the same way, so a process id alone is not unique.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, fsync, rename: it exists whole or not at all."""
    with temporary_beside(path) as temporary:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    fsync_path(path.parent)


class _SyncedFile(io.FileIO):
    """A file that is fsynced, with its directory, before its descriptor is closed."""

    def close(self) -> None:
        if not self.closed:
            try:
                os.fsync(self.fileno())
            finally:
                super().close()
            fsync_path(os.path.dirname(str(self.name)))


class _DurableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        """Open a writable stream on this location, durable once closed."""
        if not isinstance(self._filesystem, LocalFileSystem):
            return super().create(overwrite)
        make_folder_durably(Path(self._path).parent)
        return io.BufferedWriter(_SyncedFile(self._path, "wb" if overwrite else "xb"), self._buffer_size)


class DurableFileIO(PyArrowFileIO):
    """pyiceberg's PyArrow file I/O with durable local writes, in the folders where a moved lakehouse is now."""

    @staticmethod
    def parse_location(location: str, properties: Properties = EMPTY_DICT) -> tuple[str, str, str]:
        """Return (scheme, host, path), a local path literally: in pyiceberg's own reading `#` and `?` end it."""
        path = raw_path(location)
        if path is None:
            return PyArrowFileIO.parse_location(location, properties)
        return "file", "", Relocation.of_properties(properties).here(os.path.abspath(path))

    def new_output(self, location: str) -> PyArrowFile:
        """The output file at `location`."""
        plain = super().new_output(location)
        return _DurableFile(plain.location, plain._path, plain._filesystem, plain._buffer_size)
