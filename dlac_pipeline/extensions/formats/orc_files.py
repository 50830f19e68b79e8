"""ORC: the units of a file are its stripes. Iceberg's field ids are the attributes `iceberg.id`.

pyarrow shows no statistics of stripes, so filters read their columns. Timestamps are read in nanoseconds: from 1678 to 2261.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyarrow.orc import ORCFile
from pyiceberg.types import NestedField

from dlac_pipeline.lakehouse.files.file_format import Bounds

_ID, _FIELD_ID = b"iceberg.id", b"PARQUET:field_id"


class OrcFooter:
    """Footer of an ORC file."""

    def __init__(self, file: ORCFile) -> None:
        self.schema = pa.schema([_with_id(field) for field in file.schema])
        """Columns of the file."""
        self.rows = _rows_of_stripes(file)
        """Rows of each stripe."""
        stored = file.content_length / max(1, file.nrows)
        # equal values take almost nothing in the file, and their whole width in memory
        self._row_bytes = max(stored, sum(_bits(field.type) or 0 for field in self.schema) / 8)

    def bytes_of(self, unit: int) -> int:
        """Return about the bytes of a stripe, by its share of the rows: those in the file, or of columns of fixed width."""
        return int(self.rows[unit] * self._row_bytes)

    def bounds(self, unit: int, column: str, wanted: pa.DataType) -> Bounds | None:
        """Return None: no statistics are known."""

    def values(self, unit: int, column: str) -> tuple[int, int | None] | None:
        """Return None: no counts are known."""


class Orc:
    """The format of ORC files."""

    def read_footer(self, stream: Any, fields: Iterable[NestedField]) -> OrcFooter:
        """Read a footer."""
        return OrcFooter(ORCFile(stream))

    def read_unit(
        self, stream: Any, footer: OrcFooter, unit: int, columns: Sequence[str], *, remote: bool, threads: bool
    ) -> pa.Table:
        """Decode a stripe."""
        batch = ORCFile(stream).read_stripe(unit, columns=list(columns))
        return pa.Table.from_batches([batch]).select(columns)


ORC = Orc()


def _rows_of_stripes(file: ORCFile) -> Sequence[int]:
    """Return the rows of each stripe. Only a column of it shows them, so that of several stripes the narrowest is read."""
    if file.nstripes <= 1:
        return [file.nrows] * file.nstripes
    narrow = min(file.schema, key=lambda field: _cost(field.type)).name
    return [file.read_stripe(unit, columns=[narrow]).num_rows for unit in range(file.nstripes)]


def _cost(kind: pa.DataType) -> tuple[bool, bool, int]:
    # timestamps last: one outside of the range would refuse the file, even where the column is not read
    return pa.types.is_nested(kind), pa.types.is_timestamp(kind), _bits(kind) or 1 << 30


def _bits(kind: pa.DataType) -> int | None:
    """Return the bits of a value, or None for values that differ in their length."""
    try:
        return int(kind.bit_width)
    except ValueError:
        return None


def _with_id(field: pa.Field) -> pa.Field:
    """Return a field with its Iceberg id where a Parquet file has it, and with the ids of the fields inside."""
    kind, metadata = field.type, field.metadata or {}
    if pa.types.is_struct(kind):
        kind = pa.struct([_with_id(child) for child in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(_with_id(kind.value_field))
    elif pa.types.is_map(kind):
        kind = pa.map_(_with_id(kind.key_field), _with_id(kind.item_field))
    own = {_FIELD_ID: metadata[_ID]} if _ID in metadata else None
    return pa.field(field.name, kind, field.nullable, own)
