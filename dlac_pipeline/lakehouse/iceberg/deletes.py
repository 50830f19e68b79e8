"""The rows of a data file that its deletes make dead: positional delete files, deletion vectors, equality deletes.

Each delete file is read once, whatever the number of data files it applies to. Of a data file only the columns of its
equality deletes are read, and only in row groups whose statistics overlap with the deleted values.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.puffin import MAGIC_BYTES, PuffinFile
from pyiceberg.types import NestedField
from pyroaring import BitMap64

from dlac_pipeline.lakehouse.errors import DataFileUnreadable, UnsupportedDeletes
from dlac_pipeline.lakehouse.files.file_format import Bounds, Footer
from dlac_pipeline.lakehouse.files.open_file import OpenFile, open_file
from dlac_pipeline.lakehouse.iceberg import columns as parquet_columns
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, concat_chunks, expect, field_ids
from dlac_pipeline.lakehouse.iceberg.data_files import PATH_FIELD_ID, DeleteFile, LiveFile

Ints = npt.NDArray[np.int64]
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
POSITION_FIELD_ID = 2147483545
_MAGIC = b"\xd1\xd3\x39\x64"
_VECTOR = "deletion-vector-v1"
_Blob = tuple[str, int, int]
"""Type, offset and length of a blob, as a Puffin file's footer names them."""
_T = TypeVar("_T")


class Deletes:
    """Dead rows of the data files of one table. Several threads may ask at a time."""

    def __init__(self, table: Table, schema: Schema) -> None:
        self._io = table.io
        self._mapping = parquet_columns.name_mapping_of(table)
        self._fields = _all_fields(table, schema)
        self._positions: Once[Mapping[str, Ints]] = Once()
        self._values: Once[pa.Table] = Once()
        self._blobs: Once[set[_Blob] | None] = Once()

    def dead_rows(self, file: LiveFile, opened: OpenFile) -> Ints:
        """The sorted positions of the rows of `file`, which is `opened`, that its deletes name.

        Raises `DataFileUnreadable` for a delete file that cannot be read, or `UnsupportedDeletes` for a deletion vector outside
        of a Puffin file, or an equality delete of columns that do not exist or are below the top level.
        """
        found = [self.positions(file)]
        ids = sorted({delete.equality_ids for delete in file.equality})
        found.extend(self._of_values(file, opened, one) for one in ids)
        return np.unique(np.concatenate(found)) if ids else found[0]

    def positions(self, file: LiveFile) -> Ints:
        """The sorted positions of the rows of `file` that delete files name by position. Raises as `dead_rows`."""
        found = [self._of_positions(delete).get(file.path, NO_ROWS) for delete in file.positional]
        if file.vector is not None:
            found.append(self._of_vector(file.vector))
        return np.unique(np.concatenate(found)) if found else NO_ROWS

    def _of_positions(self, delete: DeleteFile) -> Mapping[str, Ints]:
        def read() -> Mapping[str, Ints]:
            with self._open_delete(delete) as opened:
                path, position = _position_columns(opened.footer.schema, delete)
                found = opened.read_all([path, position])
            return _by_path(found[path], found[position].cast(pa.int64()))

        return self._positions(delete.path, read)

    def _of_vector(self, vector: DeleteFile) -> Ints:
        with expect(_decoded(vector)), self._io.new_input(vector.path).open() as stream:
            stream.seek(vector.offset or 0)
            rows = decode_vector(stream.read(vector.size_bytes or 0), vector)
            stream.seek(0)
            blobs = self._blobs(vector.path, lambda: _puffin_blobs(stream.read(), vector.path))
        if blobs is not None and (_VECTOR, vector.offset, vector.size_bytes) not in blobs:
            raise UnsupportedDeletes(
                f"expected a blob of type {_VECTOR!r} at byte {vector.offset} in the footer of {vector.path!r}, found "
                f"{sorted(blobs)!r}: compact the table, then plan again"
            )
        return rows

    def _of_values(self, file: LiveFile, opened: OpenFile, ids: tuple[int, ...]) -> Ints:
        """Return positions of the rows whose columns `ids` equal a deleted row. Null equals null."""
        schema = self._schema_of(ids, file.path)
        deletes = [delete for delete in file.equality if delete.equality_ids == ids]
        deleted = pa.concat_tables([self._deleted_values(delete, schema) for delete in deletes])
        columns = self._columns(opened.footer, schema, file.partition_values)
        ranges = _ranges(deleted)
        first_row, found = 0, [NO_ROWS]
        for index, rows in enumerate(opened.footer.rows):
            bounds = columns.bounds(opened.footer, index).items()
            if all(_may_equal(bound, ranges[name]) for name, bound in bounds if name in ranges):
                read = opened.read(index, columns.in_file)
                found.append(first_row + matching_rows(columns.align(read, rows), deleted))
            first_row += rows
        return np.concatenate(found)

    def _deleted_values(self, delete: DeleteFile, schema: Schema) -> pa.Table:
        def read() -> pa.Table:
            with self._open_delete(delete) as opened:
                columns = self._columns(opened.footer, schema, delete.partition_values)
                lost = [one for one in columns.absent if schema.find_field(one).field_id not in delete.partition_values]
                if lost:
                    raise UnsupportedDeletes(
                        f"expected columns {lost!r} in equality delete file {delete.path!r}, found "
                        f"{opened.footer.schema.names!r}: compact the table, then plan again"
                    )
                return columns.align(opened.read_all(columns.in_file), sum(opened.footer.rows))

        return self._values((delete.path, delete.equality_ids), read)

    def _columns(self, footer: Footer, schema: Schema, partition_values: Mapping[int, Any]) -> FileColumns:
        return FileColumns.of(footer.schema, schema, schema.column_names, self._mapping, partition_values)

    def _schema_of(self, ids: tuple[int, ...], path: str) -> Schema:
        lost = [field_id for field_id in ids if field_id not in self._fields]
        if lost or not ids:
            raise UnsupportedDeletes(
                f"expected the equality deletes of {path!r} to name top-level columns of the table, found field ids {ids!r}: "
                "compact the table, then plan again"
            )
        return Schema(*(self._fields[field_id] for field_id in ids))

    @contextmanager
    def _open_delete(self, delete: DeleteFile) -> Iterator[OpenFile]:
        with expect(_decoded(delete)), self._io.new_input(delete.path).open() as stream:
            yield open_file(delete.path, stream, self._fields.values())


def _decoded(delete: DeleteFile) -> str:
    return f"delete file {delete.path!r} to decode"


class Once(Generic[_T]):
    """Values that are made once, by the first thread that asks. The others wait for it.

    The values of the last calls are kept, up to `limit_bytes` by `size_of`. The last one is always kept.
    """

    def __init__(self, limit_bytes: int = 0, size_of: Callable[[_T], int] = lambda value: 0) -> None:
        self._limit_bytes = limit_bytes
        self._size_of = size_of
        self._lock = Lock()
        self._made: OrderedDict[Hashable, Future[_T]] = OrderedDict()
        self._bytes: dict[Hashable, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the kept values."""
        return sum(list(self._bytes.values()))

    def __call__(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the result of `make`, new or kept. A failure is not kept."""
        with self._lock:
            mine = key not in self._made
            future = self._made.setdefault(key, Future())
            self._made.move_to_end(key)
        if mine:
            try:
                value = make()
            except BaseException as err:
                with self._lock:
                    self._made.pop(key, None)
                future.set_exception(err)
                return future.result()
            future.set_result(value)
            self._keep(key, self._size_of(value))
        return future.result()

    def _keep(self, key: Hashable, nbytes: int) -> None:
        with self._lock:
            self._bytes[key] = nbytes
            for oldest in [each for each in self._made if each in self._bytes and each != key]:
                if sum(self._bytes.values()) <= self._limit_bytes:
                    return
                del self._made[oldest], self._bytes[oldest]


def _all_fields(table: Table, schema: Schema) -> dict[int, NestedField]:
    """Return every top-level column that the table ever had, by field id: as in `schema`, or as it last was. All optional."""
    fields: dict[int, NestedField] = {}
    for one in (*(table.schemas()[key] for key in sorted(table.schemas())), schema):
        fields |= {found.field_id: found.model_copy(update={"required": False}) for found in one.fields}
    return fields


def _position_columns(schema: pa.Schema, delete: DeleteFile) -> tuple[str, str]:
    by_id = {field_id: found.name for field_id, found in field_ids(schema).items()}
    names = by_id.get(PATH_FIELD_ID, "file_path"), by_id.get(POSITION_FIELD_ID, "pos")
    if not set(names) <= set(schema.names):
        raise UnsupportedDeletes(
            f"expected columns 'file_path' and 'pos' in positional delete file {delete.path!r}, found {schema.names!r}: "
            "compact the table, then plan again"
        )
    return names


def _by_path(paths: pa.ChunkedArray, positions: pa.ChunkedArray) -> dict[str, Ints]:
    encoded = pa.concat_arrays([*paths.cast(pa.string()).chunks, pa.array([], pa.string())]).dictionary_encode()
    codes, rows = encoded.indices.to_numpy(), positions.to_numpy()
    order = np.lexsort((rows, codes))
    ends = np.searchsorted(codes[order], np.arange(1, len(encoded.dictionary)))
    return dict(zip(encoded.dictionary.to_pylist(), np.split(rows[order], ends), strict=False))


def decode_vector(blob: bytes, vector: DeleteFile) -> Ints:
    """The positions in a deletion vector: length, magic, 64-bit roaring bitmap, checksum. Raises `DataFileUnreadable`."""
    length, body, checksum = blob[:4], blob[4:-4], blob[-4:]
    sound = len(blob) > 12 and int.from_bytes(length, "big") == len(body) and body[:4] == _MAGIC
    if not sound or zlib.crc32(body) != int.from_bytes(checksum, "big"):
        raise DataFileUnreadable(
            f"expected a deletion vector at byte {vector.offset} of {vector.path!r}, found {len(blob)} bytes that start with "
            f"{blob[:8]!r} and do not match their checksum; restore the file, or plan another snapshot"
        )
    rows = np.asarray(BitMap64.deserialize(body[4:]).to_array()).astype(np.int64)
    if len(rows) != vector.rows:
        raise DataFileUnreadable(
            f"expected {vector.rows} rows in the deletion vector at byte {vector.offset} of {vector.path!r}, found "
            f"{len(rows)}; restore the file, or plan another snapshot"
        )
    return rows


def _puffin_blobs(content: bytes, path: str) -> set[_Blob] | None:
    """Return the blobs that the footer of a Puffin file names, or None if it is compressed, which pyiceberg refuses."""
    if {content[:4], content[-4:]} == {MAGIC_BYTES} and content[-8] > 0:
        return None
    try:
        return {(blob.type, blob.offset, blob.length) for blob in PuffinFile(content).footer.blobs}
    except ValidationError as err:
        problem = err.errors(include_url=False, include_input=False)[0]
        raise DataFileUnreadable(
            f"expected the footer of Puffin file {path!r} to name its blobs, found {problem!r}; restore the file, or plan "
            "another snapshot"
        ) from err
    except ValueError as err:
        raise UnsupportedDeletes(
            f"expected deletion vectors in a Puffin file, found a bare one at {path!r}, whose first bytes are {content[:4]!r}: "
            "no released format of Iceberg allows that; compact the table, then plan again"
        ) from err


def matching_rows(table: pa.Table, deleted: pa.Table) -> Ints:
    """Return sorted positions of the rows of `table` that `deleted` (same columns) contains. Null equals null."""
    possible = np.ones(len(table), dtype=np.bool_)
    for name in table.column_names:
        possible &= pc.is_in(table[name], value_set=_combined([deleted[name]])).to_numpy()
    rows = np.flatnonzero(possible)
    if table.num_columns == 1 or not len(rows):
        return rows
    keys = _keys(table.take(pa.array(rows)), deleted)
    return rows[np.isin(keys[: len(rows)], keys[len(rows) :])]


def _keys(table: pa.Table, deleted: pa.Table) -> Ints:
    """Return a number for each row of both tables, in this order: equal numbers for equal rows."""
    keys: Ints = np.zeros(len(table) + len(deleted), dtype=np.int64)
    for name in table.column_names:
        encoded = _combined([table[name], deleted[name]]).dictionary_encode(null_encoding="encode")
        keys = keys * (len(encoded.dictionary) + 1) + encoded.indices.to_numpy()
        # Renumbered after every column, so that the next product cannot overflow.
        keys = np.unique(keys, return_inverse=True)[1].astype(np.int64)
    return keys


def _combined(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    return concat_chunks([chunk for column in columns for chunk in column.chunks], columns[0].type)


def _ranges(deleted: pa.Table) -> dict[str, tuple[Any, Any, bool]]:
    """(least, greatest, whether null occurs) of the deleted values, as Arrow scalars, where order is not in doubt."""
    found = {}
    for name in deleted.column_names:
        column = deleted[name]
        if pa.types.is_floating(column.type) or pa.types.is_fixed_size_binary(column.type):
            continue
        extremes = pc.min_max(column)
        found[name] = (extremes["min"], extremes["max"], column.null_count > 0)
    return found


def _may_equal(bound: Bounds, deleted: tuple[Any, Any, bool]) -> bool:
    least, greatest, null = deleted
    if null and bound.nulls != 0:
        return True
    if not least.is_valid:
        return False  # only nulls are deleted, and there are none
    if bound.lower is None:
        return True
    return bool(pc.less_equal(bound.lower, greatest).as_py() and pc.less_equal(least, bound.upper).as_py())
