"""From a block's slices to Arrow: row groups are decoded in background threads, ahead of need, within a byte budget."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.name_mapping import NameMapping

from catalog.columns import FileColumns, name_mapping_of
from catalog.data_files import live_files
from catalog.errors import DataFileUnreadable
from dlac_pipeline.plan.cut import Block
from dlac_pipeline.plan.leg import LegSource
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.memory import Buffers, Bytes

PartitionValues = Callable[[str], Mapping[int, Any]]
"""Data file path -> its identity partition values by source field id."""
_SHARED_BYTES = 2**26
"""Of row groups that are kept decoded because several key groups have slices of them; the last one is always kept."""

_LIST_ITEMS = 2**31
"""More do not fit the offsets of a list array."""


class UnitUnreadable(DataFileUnreadable):
    """A row group is missing or does not decode; `detail` says which one, for who decides what becomes of it."""

    def __init__(self, path: str, row_group: int, message: str) -> None:
        super().__init__(message)
        self.detail = {"path": path, "row_group": row_group}


@dataclass(frozen=True, slots=True)
class _Opened:
    """A data file's footer, and how its columns become those of the table."""

    metadata: pq.FileMetaData
    columns: FileColumns


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
        self._row_bytes: float | None = None
        self._open = lru_cache(maxsize=1024)(self._footer)
        self._shared = _Once(_SHARED_BYTES)
        self._buffers = Buffers()

    def bytes_of(self, units: UnitTable, block: Block) -> int:
        """Estimate of the decoded size of a block: from the last rows decoded, before there are any from the footers."""
        if self._row_bytes is not None:
            return int(block.rows * self._row_bytes)
        slices = block.slices
        return int((units.bytes[slices.unit] * slices.rows // np.maximum(1, units.rows[slices.unit])).sum())

    def decode(self, units: UnitTable, block: Block) -> pa.Table:
        """All physical rows of a block, in the order of its slices, with the types of the table.

        Raises:
            UnitUnreadable: a file is missing or corrupt; names it and the row group.
        """
        slices = block.slices
        parts = (
            self._slice(units, int(unit), int(first), int(rows))
            for unit, first, rows in zip(slices.unit, slices.first, slices.rows, strict=True)
        )
        table = next(parts) if len(slices.unit) == 1 else end_to_end(parts, block.rows, self._buffers)
        self._row_bytes = table.nbytes / max(1, table.num_rows)
        return table

    def _slice(self, units: UnitTable, unit: int, first: int, rows: int) -> pa.Table:
        path, row_group = units.file_paths[int(units.file[unit])], int(units.row_group[unit])
        whole = int(units.rows[unit])
        if rows == whole:
            return self.row_group(path, row_group, whole)
        table: pa.Table = self._shared.get((path, row_group), lambda: self.row_group(path, row_group, whole))
        # A view would keep the whole decoded row group alive, once per key group that has a slice of it.
        return table.slice(first, rows) if 2 * rows > whole else table.take(np.arange(first, first + rows))

    def row_group(self, path: str, row_group: int, rows: int) -> pa.Table:
        """One row group, which was planned with `rows` rows.

        Raises:
            UnitUnreadable: it is missing or corrupt, or has another number of rows.
        """
        try:
            opened = self._open(path)
            names = opened.columns.in_file
            table = self._read(path, opened.metadata, row_group, names) if names else None
        except (OSError, pa.ArrowException) as err:
            raise UnitUnreadable(
                path,
                row_group,
                f"expected row group {row_group} of {path!r} to decode, found {type(err).__name__}: {err}; restore the file, "
                'plan another snapshot, or let such row groups be left out (on_unreadable = "quarantine")',
            ) from err
        found = opened.metadata.row_group(row_group).num_rows if table is None else table.num_rows
        if found != rows:
            raise UnitUnreadable(
                path,
                row_group,
                f"expected {rows} rows in row group {row_group} of {path!r}, as planned, found {found}: the file was altered",
            )
        return opened.columns.align(table, rows)

    def _read(self, path: str, metadata: pq.FileMetaData, row_group: int, names: list[str]) -> pa.Table:
        with self._io.new_input(path).open() as stream:
            # pre_buffer reads the column chunks in few coalesced ranges, which matters on object stores.
            file = pq.ParquetFile(stream, metadata=metadata, pre_buffer=True)
            return file.read_row_group(row_group, columns=names, use_threads=False)

    def _footer(self, path: str) -> _Opened:
        with self._io.new_input(path).open() as stream:
            file = pq.ParquetFile(stream)
            columns = self._file_columns(file.schema_arrow, {})
            if columns.absent:
                columns = self._file_columns(file.schema_arrow, self._partition_values(path))
            return _Opened(file.metadata, columns)

    def _file_columns(self, file_schema: pa.Schema, partition_values: Mapping[int, Any]) -> FileColumns:
        return FileColumns.of(
            file_schema,
            self._schema,
            self._columns,
            name_mapping=self._name_mapping,
            partition_values=partition_values,
        )


def open_decoder(table: Table, source: LegSource) -> BlockDecoder:
    """The decoder of a source's blocks, as the leg binds columns and schema."""

    @cache
    def values() -> Mapping[str, Mapping[int, Any]]:
        return {file.path: file.partition_values for file in live_files(table, source.snapshot_id)}

    return BlockDecoder(
        table.io,
        table.schemas()[source.schema_id],
        source.columns,
        name_mapping=name_mapping_of(table),
        partition_values=lambda path: values().get(path, {}),
    )


class _Once:
    """The tables that the last few calls gave, by key; a call that is under way in another thread is waited for."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._made: OrderedDict[Any, Future[pa.Table]] = OrderedDict()
        self._bytes: dict[Any, int] = {}

    @property
    def nbytes(self) -> int:
        """What is kept."""
        return sum(list(self._bytes.values()))

    def get(self, key: Any, make: Callable[[], pa.Table]) -> pa.Table:
        """What `make` gives, or gave."""
        with self._lock:
            future = self._made.get(key)
            mine = future is None
            if future is None:
                future = self._made[key] = Future()
            self._made.move_to_end(key)
        if mine:
            try:
                table = make()
            except BaseException as err:
                with self._lock:
                    self._made.pop(key, None)
                future.set_exception(err)
                return future.result()
            future.set_result(table)
            self._keep(key, table.nbytes)
        return future.result()

    def _keep(self, key: Any, nbytes: int) -> None:
        with self._lock:
            self._bytes[key] = nbytes
            for oldest in [each for each in self._made if each in self._bytes and each != key]:
                if sum(self._bytes.values()) <= self._limit_bytes:
                    return
                del self._made[oldest], self._bytes[oldest]


def end_to_end(parts: Iterable[pa.Table], rows: int, buffers: Buffers) -> pa.Table:
    """Tables of one schema and so many rows together as one, each let go of before the next one is made where types allow.

    Columns of fixed width, and lists of one length of them, are copied into one leased array: rows are then gathered from one
    place, and what a part was decoded into is used again, while it is in the processor's cache, for the next one.
    """
    columns: dict[str, _Joined] = {}
    for part in parts:
        for name in part.column_names:
            columns.setdefault(name, _Joined(rows, buffers)).add(part[name])
    return pa.table({name: column.joined() for name, column in columns.items()})


class _Joined:
    """One column, part by part."""

    def __init__(self, rows: int, buffers: Buffers) -> None:
        self._rows = rows
        self._buffers = buffers
        self._at = 0
        self._row_bytes = 0
        self._type: pa.DataType | None = None
        self._content: Bytes = np.zeros(0, dtype=np.uint8)
        self._chunks: list[pa.Array] = []

    def add(self, column: pa.ChunkedArray) -> None:
        for chunk in column.chunks:
            flat = None if self._chunks or not len(chunk) else _flat(chunk)
            if flat is not None and not self._at:
                self._type, self._row_bytes = chunk.type, len(flat) // len(chunk)
                self._content = self._buffers.lease(self._rows * self._row_bytes)
            if flat is None or len(flat) != self._row_bytes * len(chunk):
                self._chunks = [*self._copied(), chunk]
                continue
            self._content[self._at * self._row_bytes :][: len(flat)] = flat
            self._at += len(chunk)

    def joined(self) -> pa.ChunkedArray:
        return pa.chunked_array(self._chunks or self._copied())

    def _copied(self) -> list[pa.Array]:
        """What lies in `content` as an Arrow array of its type, or what was added before it could not be copied."""
        if not self._at:
            return self._chunks
        rows, kind = self._at, self._type
        self._at = 0
        if not isinstance(kind, pa.ListType):
            return [pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(self._content)])]
        length = self._row_bytes * 8 // kind.value_type.bit_width
        values = pa.Array.from_buffers(kind.value_type, rows * length, [None, pa.py_buffer(self._content)])
        offsets = pa.array(np.arange(rows + 1, dtype=np.int64) * length, type=pa.int32())
        return [pa.ListArray.from_arrays(offsets, values, type=kind)]


def _flat(array: Any) -> Bytes | None:
    """The bytes of an array, as many for each row; None where they cannot be laid end to end just so."""
    rows = len(array)
    if isinstance(array.type, pa.ListType):
        lengths = np.diff(array.offsets.to_numpy())
        if array.null_count or not lengths[0] or (lengths != lengths[0]).any() or lengths[0] * rows >= _LIST_ITEMS:
            return None
        array = array.flatten()
    kind = array.type
    fixed = pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind)
    if array.null_count or not fixed or kind.bit_width % 8:
        return None
    width = kind.bit_width // 8
    content = np.frombuffer(array.buffers()[1], dtype=np.uint8)
    return content[array.offset * width : (array.offset + len(array)) * width]


Prepared = TypeVar("Prepared")
BlockKey = tuple[int, int, int, int]
"""(source, pass, key group, block)."""


@dataclass(frozen=True, slots=True)
class Wanted(Generic[Prepared]):
    """A block that will be needed: its estimated size, and what prepares it."""

    key: BlockKey
    size_bytes: int
    prepare: Callable[[], Prepared]


class Prefetcher:
    """Prepares blocks ahead in background threads; what is ahead and what is being read stay within the budget together.

    A block that is needed now is always prepared; one that is asked for ahead waits until there is room.
    """

    def __init__(self, *, threads: int, budget_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._budget_bytes = budget_bytes
        self._waiting: OrderedDict[BlockKey, Wanted[Any]] = OrderedDict()
        self._ahead: dict[BlockKey, tuple[Future[Any], int]] = {}
        self._held: dict[BlockKey, int] = {}
        self.peak_bytes = 0
        """The most that was ahead and held at a time, as estimated."""
        self.taken = 0
        """Blocks that were taken."""
        self.late = 0
        """Blocks that were not ready when they were taken."""
        self.waited_s = 0.0
        """Seconds for which the reader waited for those."""

    def ask(self, wanted: Wanted[Any]) -> None:
        """Prepare a block ahead, as soon as the budget allows."""
        self._waiting[wanted.key] = wanted
        self._start_waiting()

    def take(self, wanted: Wanted[Prepared]) -> Prepared:
        """The prepared block, which counts as held until it is released."""
        self._waiting.pop(wanted.key, None)
        asked = self._ahead.pop(wanted.key, None)
        future = self._pool.submit(wanted.prepare) if asked is None else asked[0]
        self._held[wanted.key] = wanted.size_bytes
        self._note_peak()
        self.taken += 1
        if future.done():
            return future.result()
        self.late += 1
        started = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waited_s += time.perf_counter() - started

    def settle(self) -> None:
        """Wait until everything that may be prepared ahead by now is prepared."""
        wait([future for future, _ in self._ahead.values()])

    def release(self, key: BlockKey) -> None:
        """The block is not read any more."""
        self._held.pop(key, None)
        self._start_waiting()

    def forget(self, key: BlockKey) -> None:
        """The block is neither read nor needed any more."""
        self._waiting.pop(key, None)
        self._ahead.pop(key, None)
        self.release(key)

    def close(self) -> None:
        """Drop what was asked for and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._waiting.clear()

    def _start_waiting(self) -> None:
        for wanted in list(self._waiting.values()):
            if self._used + wanted.size_bytes > self._budget_bytes:
                return
            del self._waiting[wanted.key]
            self._ahead[wanted.key] = (self._pool.submit(wanted.prepare), wanted.size_bytes)
            self._note_peak()

    @property
    def _used(self) -> int:
        return sum(self._held.values()) + sum(size for _, size in self._ahead.values())

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._used)
