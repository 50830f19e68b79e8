"""File I/O for a local warehouse that survives a power cut. pyiceberg does not fsync the files that a catalog names."""

import io
import os
from pathlib import Path

from pyarrow.fs import LocalFileSystem
from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT, Properties

from dlac_pipeline.lakehouse.durable_io import fsync_path, make_folder_durably
from dlac_pipeline.lakehouse.iceberg.relocation import Relocation, raw_path


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
