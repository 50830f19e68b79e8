"""Decoder of blocks: slices become Arrow tables. Row groups are kept while several key groups have slices of them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io import FileIO
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.name_mapping import NameMapping

from dlac_pipeline.lakehouse.errors import DataFileUnreadable
from dlac_pipeline.lakehouse.files.file_format import Footer
from dlac_pipeline.lakehouse.files.open_file import OpenFile, format_of, open_file
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, lacks_columns, name_mapping_of
from dlac_pipeline.lakehouse.iceberg.data_files import live_files
from dlac_pipeline.lakehouse.iceberg.deletes import Once
from dlac_pipeline.plan.cut import Slices
from dlac_pipeline.plan.legs.leg import LegSource
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.joining import detached, end_to_end, join_columns
from dlac_pipeline.read.layout import WIDE_BYTES
from dlac_pipeline.read.memory import Buffers

PartitionValues = Callable[[str], Mapping[int, Any]]
"""Data file path -> its identity partition values by source field id."""
_SHARED_BYTES = 2**26
"""Bytes of row groups that are kept decoded because several key groups have slices of them. The last one is always kept."""


class UnitUnreadable(DataFileUnreadable):
    """A row group is missing or does not decode. `detail` names it, for the policy.

    A DataLoader raises its worker's error again, from the message alone. Then `detail` is empty.
    """

    def __init__(self, message: str, *, path: str | None = None, row_group: int = -1) -> None:
        super().__init__(message)
        self.detail = {} if path is None else {"path": path, "row_group": row_group}


class BlockDecoder:
    """Decodes blocks of one table's files into the named columns of one schema."""

    def __init__(
        self,
        io: FileIO,
        schema: Schema,
        columns: Sequence[str],
        *,
        name_mapping: NameMapping | None = None,
        partition_values: PartitionValues = lambda path: {},
    ) -> None:
        self._io = io
        self._schema = schema
        self._columns = tuple(columns)
        self._name_mapping = name_mapping
        self._partition_values = partition_values
        self._open = lru_cache(maxsize=1024)(self._footer)
        self._shared: Once[pa.Table] = Once(_SHARED_BYTES, lambda table: int(table.nbytes))
        self.buffers = Buffers()
        """Memory of decoded columns."""
        self._alone = cache(self._decoder_of)

    @property
    def shared_bytes(self) -> int:
        """Return the bytes that are kept of row groups with slices of several key groups."""
        return self._shared.nbytes

    def decode(self, units: UnitTable, slices: Slices) -> pa.Table:
        """Decode all physical rows of slices, in their order. Raises `UnitUnreadable` for a missing or corrupt file."""
        return pa.concat_tables(self.decode_in_order(units, slices))

    def decode_in_order(self, units: UnitTable, slices: Slices) -> list[pa.Table]:
        """Decode as `decode` does. One slice stays in the parts in which it was decoded, which can be released one by one."""
        if len(slices.unit) > 1:
            return [end_to_end(self._parts(units, slices), int(slices.rows.sum()), self.buffers)]
        [table] = self._parts(units, slices)
        # A view would keep the whole decoded part alive, once per key group that has a slice of it.
        return [pa.Table.from_batches([detached(part)]) for part in table.to_batches()] or [table]

    def decode_apart(self, units: UnitTable, slices: Slices) -> dict[str, list[pa.ChunkedArray]]:
        """Decode rows that are read in another order: wide columns in parts, which may share memory with other blocks."""
        return join_columns(self._parts(units, slices), int(slices.rows.sum()), self.buffers, wide_bytes=WIDE_BYTES)

    def _parts(self, units: UnitTable, slices: Slices) -> Iterator[pa.Table]:
        places = zip(slices.unit.tolist(), slices.first.tolist(), slices.rows.tolist(), strict=True)
        return (self._view(units, unit, first, rows) for unit, first, rows in places)

    def _view(self, units: UnitTable, unit: int, first: int, rows: int) -> pa.Table:
        (path, row_group), whole = units.place(unit), int(units.rows[unit])
        if rows == whole:
            return self.row_group(path, row_group, whole)
        table = self._shared((path, row_group), lambda: self.row_group(path, row_group, whole))
        return table.slice(first, rows)

    def row_group(self, path: str, row_group: int, rows: int) -> pa.Table:
        """A row group, planned with `rows` rows. Raises `UnitUnreadable` if it is missing, corrupt or of another length."""
        with self._naming(path, row_group):
            footer, columns = self._open(path)
            table = self._read(path, footer, row_group, columns.in_file) if columns.in_file else None
        found = footer.rows[row_group] if table is None else table.num_rows
        if found != rows:
            raise UnitUnreadable(
                f"expected {rows} rows in row group {row_group} of {path!r}, as planned, found {found}: the file was altered",
                path=path,
                row_group=row_group,
            )
        return columns.align(table, rows)

    def list_length(self, units: UnitTable, unit: int, name: str) -> int | None:
        """Return the length of the first live list of a column in a work unit, or None if all of them are null.

        The footer shows it where no list is null, and none dead. Otherwise the column is read.

        Raises `UnitUnreadable` if the row group is missing or corrupt.
        """
        (path, row_group), rows = units.place(unit), int(units.rows[unit])
        alone = self._alone(name)
        with self._naming(path, row_group):
            footer, columns = alone._open(path)
            if not columns.in_file:
                return None  # lists are no partition values
            values, nulls = footer.values(row_group, columns.in_file[0]) or (0, None)
            if nulls == values == rows:
                return None
            if nulls == 0 and not units.dead_rows(unit) and values % rows == 0 and values > rows:
                return values // rows
        column = alone.row_group(path, row_group, rows)[name].take(units.live_offsets(unit))
        lengths = pc.list_value_length(column).drop_null()
        return int(lengths[0].as_py()) if len(lengths) else None

    def _decoder_of(self, name: str) -> "BlockDecoder":
        mapping, values = self._name_mapping, self._partition_values
        return BlockDecoder(self._io, self._schema, [name], name_mapping=mapping, partition_values=values)

    @contextmanager
    def _naming(self, path: str, row_group: int) -> Iterator[None]:
        """Name the row group in what pyarrow and the file system raise."""
        try:
            yield
        except (OSError, pa.ArrowException) as err:
            raise UnitUnreadable(
                f"expected row group {row_group} of {path!r} to decode, found {type(err).__name__}: {err}; restore the file, "
                'plan another snapshot, or let such row groups be left out (on_unreadable = "quarantine")',
                path=path,
                row_group=row_group,
            ) from err

    def _read(self, path: str, footer: Footer, row_group: int, names: list[str]) -> pa.Table:
        with self._io.new_input(path).open() as stream:
            remote = urlsplit(path).scheme not in ("", "file")
            return OpenFile(stream, format_of(path), footer).read(row_group, names, remote=remote, threads=False)

    def _footer(self, path: str) -> tuple[Footer, FileColumns]:
        """Return a data file's footer, and how its columns become the table's columns."""
        with self._io.new_input(path).open() as stream:
            footer = open_file(path, stream, self._schema.fields).footer
        absent = lacks_columns(footer.schema, self._schema, self._columns, self._name_mapping)
        values = self._partition_values(path) if absent else {}
        return footer, FileColumns.of(footer.schema, self._schema, self._columns, self._name_mapping, values)


def open_decoder(table: Table, source: LegSource, snapshot_ids: Collection[int]) -> BlockDecoder:
    """The decoder of a source's blocks, as the leg binds columns and schema.

    `snapshot_ids` are the snapshots of the plans that are read: their manifests hold the values of columns that data files lack.
    """

    @cache
    def values() -> Mapping[str, Mapping[int, Any]]:
        planned = [file for each in sorted(set(snapshot_ids)) for file in live_files(table, each)]
        return {file.path: file.partition_values for file in planned}

    def values_of(path: str) -> Mapping[int, Any]:
        found = values().get(path)
        if found is None:
            raise UnitUnreadable(
                f"expected data file {path!r} in the manifests of {source.table!r} at snapshots {sorted(set(snapshot_ids))!r}, "
                "as planned, found it in none: restore the table's metadata, or plan another snapshot"
            )
        return found

    return BlockDecoder(
        table.io,
        table.schemas()[source.schema_id],
        source.columns,
        name_mapping=name_mapping_of(table),
        partition_values=values_of,
    )
