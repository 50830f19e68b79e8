"""From a block's slices to arrays: row groups are decoded in background threads, ahead of need, within a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema

from catalog.errors import DataFileUnreadable
from catalog.row_groups import file_columns
from dlac_pipeline.plan.cut import Block
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.columns import Array, to_numpy

Arrays = dict[str, Array]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A data file's footer and the names that its columns have in it."""

    metadata: pq.FileMetaData
    columns: dict[str, str]


class BlockDecoder:
    """Decodes blocks of one plan; `columns` decide what is read and in which type."""

    def __init__(self, io: FileIO, schema: Schema, units: UnitTable, columns: Sequence[str]) -> None:
        self._io = io
        self._schema = schema
        self._units = units
        self._columns = tuple(columns)
        self._types = schema_to_pyarrow(schema, include_field_ids=False)
        self._row_bytes: float | None = None
        self._open = lru_cache(maxsize=1024)(self._footer)

    def bytes_of(self, block: Block) -> int:
        """Estimate of the decoded size of a block: from the last row decoded, before there is one from the footers."""
        if self._row_bytes is not None:
            return int(block.rows * self._row_bytes)
        units, slices = self._units, block.slices
        return int((units.bytes[slices.unit] * slices.rows // np.maximum(1, units.rows[slices.unit])).sum())

    def decode(self, block: Block) -> Arrays:
        """All physical rows of a block: column -> array [R] or [R, length].

        Raises:
            DataFileUnreadable: a file is missing or corrupt; names it and the row group.
            UnsupportedColumn: nulls or lists of different lengths.
        """
        parts = [
            self._decode_slice(int(unit), int(first), int(rows))
            for unit, first, rows in zip(block.slices.unit, block.slices.first, block.slices.rows, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in self._columns}

    @cached_property
    def first_row(self) -> Arrays:
        """The plan's first row, for the shapes and types of the columns."""
        return self._decode_slice(0, 0, 1)

    def _decode_slice(self, unit: int, first: int, rows: int) -> Arrays:
        path = self._units.file_paths[int(self._units.file[unit])]
        row_group = int(self._units.row_group[unit])
        origin = f"row group {row_group} of {path!r}"
        try:
            opened = self._open(path)
            with self._io.new_input(path).open() as stream:
                file = pq.ParquetFile(stream, metadata=opened.metadata)
                table = file.read_row_group(row_group, columns=list(opened.columns.values()), use_threads=False)
        except (OSError, pa.ArrowInvalid) as err:
            raise DataFileUnreadable(
                f"expected {origin} to decode, found {type(err).__name__}: {err}; restore the file, or plan another snapshot"
            ) from err
        if table.num_rows != self._units.rows[unit]:
            raise DataFileUnreadable(
                f"expected {self._units.rows[unit]} rows in {origin}, as planned, found {table.num_rows}: the file was altered"
            )
        arrays = {}
        for name, name_in_file in opened.columns.items():
            column = table[name_in_file].slice(first, rows)
            array = to_numpy(_widened(column, self._types.field(name).type), name=name, origin=origin)
            # A view would keep the whole decoded row group alive, once per key group that has a slice of it.
            arrays[name] = array if 2 * rows > table.num_rows else array.copy()
        self._row_bytes = sum(array.nbytes for array in arrays.values()) / max(1, rows)
        return arrays

    def _footer(self, path: str) -> _Opened:
        with self._io.new_input(path).open() as stream:
            file = pq.ParquetFile(stream)
            return _Opened(file.metadata, file_columns(file.schema_arrow, self._schema, self._columns))


def _widened(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """The column in the table's type, for files written before the type was widened."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        if column.type.value_type == wanted.value_type:
            return column
        return column.cast(pa.list_(wanted.value_type))
    return column if column.type == wanted else column.cast(wanted)


BlockKey = tuple[int, int, int]
"""(pass, key group, block)."""


class Prefetcher:
    """Decoded blocks by key: `ask` starts decoding if the budget allows, `take` waits for the result."""

    def __init__(self, decoder: BlockDecoder, *, threads: int, budget_bytes: int) -> None:
        self._decoder = decoder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._budget_bytes = budget_bytes
        self._asked: dict[BlockKey, tuple[Future[Arrays], int]] = {}

    def ask(self, key: BlockKey, block: Block) -> None:
        """Start decoding a block that will be needed, unless that would exceed the budget."""
        size = self._decoder.bytes_of(block)
        ahead = sum(size for _, size in self._asked.values())
        if key not in self._asked and ahead + size <= self._budget_bytes:
            self._asked[key] = (self._pool.submit(self._decoder.decode, block), size)

    def take(self, key: BlockKey, block: Block) -> Arrays:
        """The decoded block; decoded here and now if it was not asked for."""
        asked = self._asked.pop(key, None)
        return self._decoder.decode(block) if asked is None else asked[0].result()

    def close(self) -> None:
        """Drop what was asked for and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._asked.clear()
