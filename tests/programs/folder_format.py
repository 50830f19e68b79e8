"""A source format of another distribution: Parquet files, and versions.json with the deleted positions in each version."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.parquet as pq
from pyiceberg.io import FileIO

from dlac_pipeline.extensions.formats.mirror import MirroredFormat
from dlac_pipeline.extensions.formats.versions import ExternalFile, ExternalVersion
from dlac_pipeline.lakehouse.errors import NoSuchSnapshot, NoSuchTable


class Folder:
    """A folder with its versions."""

    def __init__(self, location: str, _: Mapping[str, str], io: FileIO) -> None:
        self._location, self._io = location, io
        try:
            with io.new_input(f"{location}/versions.json").open() as stream:
                self._versions: list[dict[str, list[int]]] = json.loads(stream.read())
        except FileNotFoundError as err:
            raise NoSuchTable(f"expected versions.json in {location!r}, found none: correct source.table") from err
        self.newest = len(self._versions) - 1
        self.table_id = location

    def numbers(self, after: int, until: int) -> Sequence[int]:
        """Return the versions after one version, up to and with another."""
        return range(after + 1, until + 1)

    def read(self, number: int) -> ExternalVersion:
        """Return a version."""
        if number > self.newest:
            raise NoSuchSnapshot(f"expected version {number} of {self._location!r}, found 0 to {self.newest}")
        files = tuple(self._file(name, dead) for name, dead in self._versions[number].items())
        with self._io.new_input(files[-1].path).open() as stream:
            schema = pq.read_schema(stream)
        return ExternalVersion(number=number, schema=schema, partition_columns=(), files=files, only_rewrites=False)

    def _file(self, name: str, dead: Sequence[int]) -> ExternalFile:
        path = f"{self._location}/{name}"
        size = len(self._io.new_input(path))
        return ExternalFile(path=path, bytes=size, rows=None, partition=(), dead=np.array(dead, dtype=np.int64))


FOLDER = MirroredFormat(Folder)
