"""Columns of Arrow as columns of tensors: the types that can become tensors, and Arrow buffers as arrays.

The schema and the source's declarations determine the tensors of a column, never the data. docs/reading.md lists them by type.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as ice
from pyiceberg.schema import Schema

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.columns import byte_strings_in, concat_chunks, is_list

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_ITEMS: dict[type, type[np.generic]] = {
    ice.BooleanType: np.bool_,
    ice.IntegerType: np.int32,
    ice.LongType: np.int64,
    ice.FloatType: np.float32,
    ice.DoubleType: np.float64,
    **dict.fromkeys((ice.DateType, ice.TimeType, ice.TimestampType, ice.TimestamptzType), np.int64),
    **dict.fromkeys((ice.TimestampNanoType, ice.TimestamptzNanoType), np.int64),
}
_BYTES = (ice.StringType, ice.BinaryType)
_FIXED_BYTES = (ice.FixedType, ice.UUIDType)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnKind:
    """The tensors of a column.

    `items` is the dtype of its values, `listed` whether a row is a list of them, `width` the bytes of a row of fixed bytes,
    `length` the length of every list where it is known, and `inner` the shape of an item of lists that are nested.
    """

    name: str
    items: np.dtype[Any]
    width: int | None = None
    listed: bool = False
    ragged: bool = False
    nullable: bool = False
    length: int | None = None
    inner: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors."""
        offsets = (f"{self.name}.offsets",) if self.ragged else ()
        return (self.name, *offsets, *((f"{self.name}.valid",) if self.nullable else ()))


@dataclass(frozen=True, slots=True)
class Column:
    """Decoded rows of a column: `values` [rows] or [rows, length, ...], or flat with `offsets` [rows + 1] where it is ragged.

    `valid` [rows] exists if the column is declared nullable. Arrays may be read-only views of Arrow buffers.
    """

    values: Array
    offsets: Ints | None = None
    valid: Flags | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def lengths_of(self, rows: Ints | slice) -> Ints:
        """Return the number of values of rows of a ragged column, int64. Of another one it is 0."""
        offsets = np.zeros(self.rows + 1, dtype=np.int64) if self.offsets is None else self.offsets
        return offsets[1:][rows] - offsets[:-1][rows]

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays. Those of `values` outside `offsets` are not counted."""
        offsets = self.offsets
        used = self.values if offsets is None else self.values[int(offsets[0]) : int(offsets[-1])]
        return sum(array.nbytes for array in (used, offsets, self.valid) if array is not None)


def kinds_of(
    schema: Schema, names: Sequence[str], ragged: Collection[str] = (), nullable: Collection[str] = ()
) -> dict[str, ColumnKind]:
    """Return the tensors of the named columns, which the schema has. `ragged` and `nullable` are the columns so declared.

    Raise `UnsupportedColumn` if a column cannot become a tensor, is declared as something that it cannot be, or yields a tensor
    with the name of another column's.
    """
    fields = {field.name: field.field_type for field in schema.fields}
    kinds = {name: _kind_of(name, fields[name], name in ragged, name in nullable) for name in names}
    made_by: dict[str, str] = {}
    for kind in kinds.values():
        for tensor in kind.tensors:
            other = made_by.setdefault(tensor, kind.name)
            if other != kind.name:
                first, second = sorted((other, kind.name))
                raise UnsupportedColumn(
                    f"expected tensors of different names from columns {first!r} and {second!r}, found {tensor!r} from both: "
                    f"leave one of them out of `columns`, or rename column {second!r} in the table"
                )
    return kinds


def check_names(schema: Schema, names: Sequence[str], *, setting: str) -> None:
    """Raise `NoSuchColumn` unless every column that `setting` names is at the top level of the schema, whatever its type."""
    fields = [field.name for field in schema.fields]
    for name in names:
        if name not in fields:
            raise NoSuchColumn.of(setting, name, fields)


def check_identity(schema: Schema, names: Sequence[str], *, setting: str = "identity_columns") -> None:
    """Raise `SpecInvalid` if a column that identifies rows is not of a primitive type, and as `check_names`."""
    for name in names:
        check_names(schema, [name], setting=setting)
        found = next(field.field_type for field in schema.fields if field.name == name)
        if not isinstance(found, ice.PrimitiveType):
            raise SpecInvalid(
                f"expected identity column {name!r} to be of a primitive type, found {found}: name another"
            )


def _kind_of(name: str, column_type: ice.IcebergType, ragged: bool, nullable: bool) -> ColumnKind:
    if isinstance(column_type, _BYTES):
        return ColumnKind(name=name, items=np.dtype(np.uint8), ragged=True, nullable=nullable)
    listed = isinstance(column_type, ice.ListType)
    if ragged and not listed:
        raise UnsupportedColumn(
            f"expected a list column among the ragged ones, found {name!r} of type {column_type}: do not declare it ragged"
        )
    if isinstance(column_type, _FIXED_BYTES):
        width = 16 if isinstance(column_type, ice.UUIDType) else len(column_type)
        return ColumnKind(name=name, items=np.dtype(np.uint8), width=width, nullable=nullable)
    items = _ITEMS.get(type(column_type.element_type if isinstance(column_type, ice.ListType) else column_type))
    if items is None:
        raise UnsupportedColumn(
            f"expected column {name!r} to be a number, boolean, date, time, timestamp, fixed[n], uuid, string, binary, or a "
            f"list of numbers, found {column_type}: such a column cannot become a tensor; leave it out or convert it"
        )
    return ColumnKind(name=name, items=np.dtype(items), listed=listed, ragged=ragged, nullable=nullable)


def to_column(column: pa.ChunkedArray, kind: ColumnKind, *, origin: str, live: Flags | None = None) -> Column:
    """Return a column in the table's Arrow type as arrays: views of the Arrow buffers where possible.

    `live` [rows] are the rows that are read, where others are dead and have undefined content.

    Raises:
        UnsupportedColumn: nulls in a column not declared nullable, or inside lists, or lists of different lengths in a column
            not declared ragged. The message names the column and the file (`origin`).
    """
    array = concat_chunks(column.chunks, column.type)
    try:
        return _of_array(array, kind, origin)
    except UnsupportedColumn:
        if live is None:
            raise
    masked = pc.if_else(pa.array(live), array, pa.scalar(None, array.type))
    if not kind.nullable:
        _check_nulls(kind, masked.null_count - int((~live).sum()), origin)
    found = _of_array(masked, replace(kind, nullable=True), origin)
    return found if kind.nullable else replace(found, valid=None)


def _check_nulls(kind: ColumnKind, nulls: int, origin: str) -> None:
    if nulls:
        raise UnsupportedColumn(
            f"expected no nulls in column {kind.name!r}, found {nulls} in {origin}: declare it "
            f'nullable = ["{kind.name}"], or filter them out with row_filter = "{kind.name} IS NOT NULL"'
        )


def _of_array(array: Any, kind: ColumnKind, origin: str) -> Column:
    if not kind.nullable:
        _check_nulls(kind, array.null_count, origin)
    valid = np.asarray(array.is_valid()) if kind.nullable else None
    if kind.listed:
        return _lists(array, kind, valid, origin)
    if kind.ragged:
        return _byte_strings(array, valid)
    values = _fixed_bytes(array) if pa.types.is_fixed_size_binary(array.type) else _items(array, kind.items)
    return Column(_zeroed(values, valid), None, valid)


def _zeroed(values: Array, valid: Flags | None) -> Array:
    if valid is None or valid.all():
        return values
    values = values.copy()
    values[~valid] = 0
    return values


def _items(array: Any, items: np.dtype[Any]) -> Array:
    """Return a flat Arrow array of numbers, booleans or times. The content in place of nulls is undefined."""
    if pa.types.is_boolean(array.type):
        array = array.fill_null(False) if array.null_count else array
        return np.asarray(array.to_numpy(zero_copy_only=False))
    bits = array.type.bit_width
    stored = array.view(pa.int32() if bits == 32 else pa.int64()) if pa.types.is_temporal(array.type) else array
    dtype = stored.type.to_pandas_dtype()
    found = np.frombuffer(stored.buffers()[1] or b"", dtype=dtype)[stored.offset : stored.offset + len(stored)]
    return found if found.dtype == items else found.astype(items)


def _fixed_bytes(array: Any) -> Array:
    width = array.type.byte_width
    found = np.frombuffer(array.buffers()[1] or b"", dtype=np.uint8)
    return found[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)


def _byte_strings(array: Any, valid: Flags | None) -> Column:
    empty = "" if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) else b""
    array = array.fill_null(empty) if array.null_count else array
    if not len(array):
        return Column(np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64), valid)
    offsets, values = byte_strings_in(array)
    return Column(values, offsets.astype(np.int64, copy=False), valid)


def _lists(array: Any, kind: ColumnKind, valid: Flags | None, origin: str) -> Column:
    lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64, copy=False)
    values = array.flatten()  # of the rows that are not null
    if values.null_count:
        raise UnsupportedColumn(
            f"expected no nulls inside the lists of column {kind.name!r}, found {values.null_count} in {origin}: fill them "
            "in the table, or leave the column out"
        )
    items = _items(values, kind.items)
    if kind.ragged:
        return Column(items, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), valid)
    sizes = lengths if valid is None else lengths[valid]
    _check_lengths(sizes, kind, origin)
    dense = items.reshape(len(sizes), int(sizes[0]) if len(sizes) else 0)
    if valid is None or valid.all():
        return Column(dense, None, valid)
    spread = np.zeros((len(array), dense.shape[1]), dtype=items.dtype)
    spread[valid] = dense
    return Column(spread, None, valid)


def _check_lengths(sizes: Ints, kind: ColumnKind, origin: str) -> None:
    if len(sizes) and (sizes != sizes[0]).any():
        raise UnsupportedColumn(
            f"expected lists of one length in column {kind.name!r}, found {sizes.min()} to {sizes.max()} in {origin}: pack "
            f'them with [sequences], or declare them ragged = ["{kind.name}"]'
        )


def of_one_shape(parts: Sequence[Column], live: Sequence[Flags | None], kind: ColumnKind, origin: str) -> list[Column]:
    """Return the parts of a column, with rows of one shape also where no row is live and not null.

    `live` are the live rows of each part, None for all. Raises `UnsupportedColumn` for lists of different lengths.
    """
    if len(parts) == 1 or not kind.listed or kind.ragged:
        return [*parts]
    lengths = [part.values.shape[1] for part, mine in zip(parts, live, strict=True) if _has_values(part, mine)]
    _check_lengths(np.array(lengths, dtype=np.int64), kind, origin)
    length = lengths[0] if lengths else 0
    return [
        part if part.values.shape[1] == length else replace(part, values=np.zeros((part.rows, length), kind.items))
        for part in parts
    ]


def _has_values(part: Column, live: Flags | None) -> bool:
    """Return True if a row is live and not null."""
    flags = [each for each in (part.valid, live) if each is not None]
    return bool(np.logical_and.reduce(flags).any()) if flags else True


def to_numpy(column: pa.ChunkedArray, *, name: str, origin: str) -> Array:
    """Return a column of any type as an array [rows, ...] with one dimension for each level of lists, a view where possible.

    Raises `UnsupportedColumn` for nulls, lists of different lengths, and types without a tensor. It names the column, and as
    `origin` what made it.
    """
    try:
        return _dense(concat_chunks(column.chunks, column.type))
    except UnsupportedColumn as err:
        raise UnsupportedColumn(f"expected column {name!r} of {origin} to become a tensor, found {err}") from err


def _dense(array: Any) -> Array:
    """Return an array without nulls as numbers. Raises `UnsupportedColumn` with the reason and what to do."""
    if array.null_count:
        raise UnsupportedColumn(f"{array.null_count} nulls in it: drop or fill them")
    if pa.types.is_dictionary(array.type):
        return _dense(array.dictionary_decode())
    if is_list(array.type):
        sizes = np.unique(pc.list_value_length(array).to_numpy())
        if len(sizes) > 1:
            raise UnsupportedColumn(
                f"lists of {sizes[0]} to {sizes[-1]} items: give all lists one length, or pack them with [sequences]"
            )
        fixed = pa.types.is_fixed_size_list(array.type)
        size = array.type.list_size if fixed else int(sizes[0]) if len(sizes) else 0
        items = _dense(array.flatten())  # unlike `values`, only the items of this slice
        return items.reshape(len(array), size, *items.shape[1:])
    if pa.types.is_fixed_size_binary(array.type):
        return _fixed_bytes(array)
    if pa.types.is_temporal(array.type) and not pa.types.is_interval(array.type):
        return _items(array, np.dtype(np.int64))
    if pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type):
        return _items(array, np.dtype(array.type.to_pandas_dtype()))
    raise UnsupportedColumn(
        f"values of type {array.type}: give numbers, booleans, dates, times, fixed bytes or lists of these, or leave it out"
    )
