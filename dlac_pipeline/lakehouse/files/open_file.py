"""Opening of data files. Parquet is built in, and other formats enter through the door `dlac.files`.

The suffix of a file's name is the name of its format's entry point: `orc` reads files whose names end in ".orc". A file of
another suffix is Parquet.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa
from pyiceberg.types import NestedField

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.files.file_format import FileFormat, Footer
from dlac_pipeline.lakehouse.files.parquet import PARQUET

FILES = Door("dlac.files", "file format")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A data file that is open."""

    stream: Any
    format: FileFormat
    footer: Footer

    def read(self, unit: int, columns: Sequence[str], *, remote: bool = False, threads: bool = True) -> pa.Table:
        """Decode columns of a unit. Without `threads` the calling thread does."""
        return self.format.read_unit(self.stream, self.footer, unit, columns, remote=remote, threads=threads)

    def read_all(self, columns: Sequence[str]) -> pa.Table:
        """Decode columns of all units."""
        parts = [self.read(unit, columns) for unit in range(len(self.footer.rows))]
        return pa.concat_tables(parts) if parts else self.footer.schema.empty_table().select(columns)


def open_file(path: str, stream: Any, fields: Iterable[NestedField]) -> OpenFile:
    """Read the footer of the file at `path`, whose content is `stream`. Raise as `FileFormat.read_footer`, or `BadInput`."""
    found = format_of(path)
    return OpenFile(stream, found, found.read_footer(stream, fields))


def format_of(path: str) -> FileFormat:
    """Return the format of the file at `path`. Raise `BadInput` if its format cannot be imported."""
    return _format_of_suffix(_suffix_of(path))


def has_installed_format(path: str) -> bool:
    """Return True if the suffix of a file's name is that of an installed format, which Parquet is not."""
    return format_of(path) is not PARQUET


def _suffix_of(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[2].lower()


@cache
def _format_of_suffix(suffix: str) -> FileFormat:
    if suffix == "parquet" or suffix not in FILES.points():
        return PARQUET
    found: FileFormat = FILES.load(suffix, setting="the suffix of a data file")
    return found
