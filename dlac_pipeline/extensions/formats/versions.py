"""A table of another format, its versions, and the data files of a version with their partition values and dead rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyiceberg.io import FileIO

from dlac_pipeline.lakehouse.files.open_file import open_file
from dlac_pipeline.lakehouse.iceberg.columns import expect
from dlac_pipeline.lakehouse.iceberg.deletes import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalFile:
    """A live data file. `rows` is None where the table does not record it. `dead` are sorted positions of deleted rows.

    `partition` has the values of the partition columns, as Iceberg stores them.
    """

    path: str
    bytes: int
    rows: int | None
    partition: tuple[Any, ...]
    dead: Ints

    def count_rows(self, io: FileIO) -> int:
        """Return the number of rows, from the footer if unrecorded. Raise `DataFileUnreadable`, or `BadInput`."""
        if self.rows is not None:
            return self.rows
        place, advice = f"a data file at {self.path!r}", "restore it, or name a later source.version"
        with expect(place, advice), io.new_input(self.path).open() as stream:
            return sum(open_file(self.path, stream, ()).footer.rows)

    def continues(self, size: int | None, dead: Ints) -> bool:
        """Return True if it is the file that had this size and these dead rows, and no row lives again."""
        return self.bytes == size and (not len(dead) or bool(np.isin(dead, self.dead).all()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalVersion:
    """A version of a table. `only_rewrites`: its commit moved rows to other files, and neither added nor changed one."""

    number: int
    schema: pa.Schema
    partition_columns: tuple[str, ...]
    files: tuple[ExternalFile, ...]
    only_rewrites: bool


class ExternalTable(Protocol):
    """A table of another format. Numbers of versions are int64, at least 0, and grow."""

    newest: int
    """Number of the newest version."""
    table_id: str
    """Identity of the table: another table at the same location has another one."""

    def numbers(self, after: int, until: int) -> Sequence[int]:
        """Return the versions after one version, up to and with another, in growing order."""

    def read(self, number: int) -> ExternalVersion:
        """Return a version. Raise `NoSuchSnapshot`, or `UnsupportedSnapshot` if it cannot be read exactly."""
