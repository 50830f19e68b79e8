"""Interface of a format of data files: the footer of a file, and the rows of its units.

A unit is a part of a file that can be read alone: a row group of Parquet, a stripe of ORC. Units are numbered from 0. Work
units, filters, deletes, reader and audit know a file by these protocols only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyiceberg.types import NestedField


@dataclass(frozen=True, slots=True)
class Bounds:
    """Statistics of a column in a unit: Arrow scalars in the table's type. None where unknown. NaN is ignored."""

    nulls: int | None
    lower: Any
    upper: Any


class Footer(Protocol):
    """Facts of a data file. It is kept after the file is closed."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of the file. The metadata `PARQUET:field_id` of a column is its Iceberg field id."""

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each unit."""

    def bytes_of(self, unit: int) -> int:
        """Return about the bytes of a unit in memory."""

    def bounds(self, unit: int, column: str, wanted: pa.DataType) -> Bounds | None:
        """Return the statistics of a column that is not nested, in the type `wanted`. None: the file has none."""

    def values(self, unit: int, column: str) -> tuple[int, int | None] | None:
        """Return how many values, nulls included, and how many nulls the first leaf of a column has. None: unknown."""


class FileFormat(Protocol):
    """Format of data files. The entry point of a format names an instance. Both methods raise OSError or ArrowException."""

    def read_footer(self, stream: Any, fields: Iterable[NestedField]) -> Footer:
        """Read the footer of a file, whose columns are read as `fields`."""

    def read_unit(
        self, stream: Any, footer: Any, unit: int, columns: Sequence[str], *, remote: bool, threads: bool
    ) -> pa.Table:
        """Decode top-level columns of a unit. `footer` is this format's. `remote`: a request takes long.

        Without `threads` the calling thread decodes.
        """
