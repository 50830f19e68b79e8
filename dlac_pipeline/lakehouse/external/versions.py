"""A version of a table of another format: its schema, and its data files with their partition values and dead rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO

from dlac_pipeline.lakehouse.errors import DataFileUnreadable
from dlac_pipeline.lakehouse.iceberg.deletes import Ints

_STORAGE_OPTIONS = {
    "s3.endpoint": "AWS_ENDPOINT_URL",
    "s3.access-key-id": "AWS_ACCESS_KEY_ID",
    "s3.secret-access-key": "AWS_SECRET_ACCESS_KEY",
    "s3.session-token": "AWS_SESSION_TOKEN",
    "s3.region": "AWS_REGION",
}


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
        """Return the number of rows, from the footer if the table does not record it. Raises `DataFileUnreadable`."""
        if self.rows is not None:
            return self.rows
        try:
            with io.new_input(self.path).open() as stream:
                return int(pq.ParquetFile(stream).metadata.num_rows)
        except (OSError, pa.ArrowException) as err:
            raise DataFileUnreadable(
                f"expected a Parquet file at {self.path!r}, found {type(err).__name__}: {err}; restore it, or name a later "
                "source.version"
            ) from err

    def continues(self, size: int | None, dead: Ints) -> bool:
        """Return True if it is the file that had this size and these dead rows, and no row lives again."""
        return self.bytes == size and (not len(dead) or bool(np.isin(dead, self.dead).all()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalVersion:
    """One version of a table. `only_rewrites`: its commit moved rows to other files, and neither added nor changed one."""

    number: int
    schema: pa.Schema
    partition_columns: tuple[str, ...]
    files: tuple[ExternalFile, ...]
    only_rewrites: bool


def storage_options(properties: Mapping[str, str]) -> dict[str, str]:
    """Return pyiceberg's properties of an object store under the names that the readers of other formats use."""
    found = {theirs: properties[ours] for ours, theirs in _STORAGE_OPTIONS.items() if ours in properties}
    if found.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        found["AWS_ALLOW_HTTP"] = "true"
    return found
