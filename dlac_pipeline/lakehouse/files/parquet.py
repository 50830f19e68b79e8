"""Parquet: the units of a file are its row groups."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg import types as ice
from pyiceberg.schema import index_by_id

from dlac_pipeline.lakehouse.files.file_format import Bounds

_NANOSECONDS = (pa.timestamp("ns"), pa.timestamp("ns", "UTC"))
_MICROSECONDS = {ice.TimestampType, ice.TimestamptzType}
_PART_BYTES = 2**20
"""Bytes that are decoded at once where one thread decodes: they fit into a processor's cache, and no buffer grows far."""
_MOST_PARTS = 32


class ParquetFooter:
    """Footer of a Parquet file."""

    def __init__(self, file: pq.ParquetFile, time_unit: str = "us") -> None:
        """`time_unit`: that of timestamps stored as INT96."""
        self.schema: pa.Schema = file.schema_arrow
        """Columns of the file."""
        self.metadata: pq.FileMetaData = file.metadata
        self.time_unit = time_unit

    @cached_property
    def rows(self) -> Sequence[int]:
        """Rows of each row group."""
        return [self.metadata.row_group(unit).num_rows for unit in range(self.metadata.num_row_groups)]

    def bytes_of(self, unit: int) -> int:
        """Return the bytes of a row group, not compressed."""
        return int(self.metadata.row_group(unit).total_byte_size)

    def bounds(self, unit: int, column: str, wanted: pa.DataType) -> Bounds | None:
        """Return the statistics of a column that is not nested."""
        found = self.schema.field(column).type
        statistics = None if pa.types.is_nested(found) else self._chunk(unit, column).statistics
        if statistics is None:
            return None
        nulls = statistics.null_count if statistics.has_null_count else None
        return Bounds(nulls, *_extremes(statistics, found, wanted))

    def values(self, unit: int, column: str) -> tuple[int, int | None]:
        """Return how many values and how many nulls the first leaf of a column has."""
        chunk = self._chunk(unit, column)
        return chunk.num_values, None if chunk.statistics is None else chunk.statistics.null_count

    def part_rows(self, unit: int, columns: Iterable[str]) -> int:
        """Return into how many rows at a time columns of a row group are decoded by one thread."""
        group, rows = self.metadata.row_group(unit), self.rows[unit]
        places = [(self._first_leaves[name], _leaves(self.schema.field(name).type)) for name in columns]
        leaves = [group.column(first + leaf) for first, count in places for leaf in range(count)]
        parts = min(_MOST_PARTS, sum(int(leaf.total_uncompressed_size) for leaf in leaves) // _PART_BYTES)
        return -(-rows // max(1, parts))

    def _chunk(self, unit: int, column: str) -> Any:
        return self.metadata.row_group(unit).column(self._first_leaves[column])

    @cached_property
    def _first_leaves(self) -> Mapping[str, int]:
        """Return the place of each top-level column's first leaf: by place, because a path with dots may name two leaves."""
        places, place = {}, 0
        for field in self.schema:
            places[field.name] = place
            place += _leaves(field.type)
        return places


class Parquet:
    """The format of Parquet files."""

    def read_footer(self, stream: Any, fields: Iterable[ice.NestedField]) -> ParquetFooter:
        """Read a footer."""
        unit = _time_unit(fields)
        return ParquetFooter(pq.ParquetFile(stream, coerce_int96_timestamp_unit=unit), unit)

    def read_unit(
        self, stream: Any, footer: ParquetFooter, unit: int, columns: Sequence[str], *, remote: bool, threads: bool
    ) -> pa.Table:
        """Decode a row group. If it is `remote`, all column chunks are read in few coalesced ranges, by other threads."""
        known = {"metadata": footer.metadata, "coerce_int96_timestamp_unit": footer.time_unit}
        file = pq.ParquetFile(stream, pre_buffer=remote, **known)
        part_rows = footer.rows[unit] if threads else footer.part_rows(unit, columns)
        if part_rows < footer.rows[unit]:
            return pa.Table.from_batches(file.iter_batches(part_rows, [unit], list(columns), use_threads=False))
        return file.read_row_group(unit, columns=list(columns), use_threads=threads)


PARQUET = Parquet()


def open_parquet(stream: Any, fields: Iterable[ice.NestedField]) -> pq.ParquetFile:
    """Open a Parquet file to read these columns of a table."""
    return pq.ParquetFile(stream, coerce_int96_timestamp_unit=_time_unit(fields))


def _time_unit(fields: Iterable[ice.NestedField]) -> str:
    """Return the unit in which timestamps stored as INT96 are read.

    They can be any date from year 1 to 9999, which nanoseconds in 64 bits cannot, so they are read in the table's own unit.
    """
    kinds = {type(field.field_type) for field in index_by_id(ice.StructType(*fields)).values()}
    nanoseconds = kinds & {ice.TimestampNanoType, ice.TimestamptzNanoType} and not kinds & _MICROSECONDS
    return "ns" if nanoseconds else "us"


def _leaves(arrow: pa.DataType) -> int:
    if not pa.types.is_nested(arrow):
        return 1
    return sum(_leaves(arrow.field(place).type) for place in range(arrow.num_fields))


def _extremes(statistics: pq.Statistics, found: Any, wanted: Any) -> tuple[Any, Any]:
    """Return least and greatest value as Arrow scalars of the table's type, or (None, None) if they are unreliable."""
    if not statistics.has_min_max or pa.types.is_fixed_size_binary(wanted):
        return None, None
    try:
        if found in _NANOSECONDS:  # Python's datetime would lose digits
            pair = pa.array([statistics.min_raw, statistics.max_raw], type=pa.timestamp("ns")).cast(wanted, safe=False)
        else:
            pair = pa.array([statistics.min, statistics.max], type=wanted)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        return None, None  # outside the range of Python's types, or cut in the middle of a character
    if pa.types.is_floating(wanted) and pc.any(pc.is_nan(pair)).as_py():
        return None, None
    return pair[0], pair[1]
