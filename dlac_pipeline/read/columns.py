"""From Iceberg columns to tensor columns: which types can become tensors, and how Arrow buffers become arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BooleanType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
)

from catalog.errors import NoSuchColumn, UnsupportedColumn

Array = npt.NDArray[Any]
_SCALARS = (BooleanType, IntegerType, LongType, FloatType, DoubleType)


def check_columns(schema: Schema, names: Sequence[str]) -> None:
    """Check that every named column is there and can become a tensor.

    Raises:
        NoSuchColumn: a column is not in the schema.
        UnsupportedColumn: a column has another type than a number, a boolean, fixed bytes, or a list of numbers.
    """
    for name in names:
        if name not in {field.name for field in schema.fields}:
            raise NoSuchColumn(f"expected column {name!r} in the table, found only {schema.column_names!r}")
        column_type = schema.find_type(name)
        if not _is_tensor(column_type):
            raise UnsupportedColumn(
                f"expected column {name!r} to be a number, boolean, fixed[n] or a list of numbers, found {column_type}: "
                "such a column cannot become a tensor; leave it out or convert it in the table"
            )


def _is_tensor(column_type: IcebergType) -> bool:
    if isinstance(column_type, ListType):
        return isinstance(column_type.element_type, _SCALARS)
    return isinstance(column_type, (*_SCALARS, FixedType))


def to_numpy(column: pa.ChunkedArray, *, name: str, origin: str) -> Array:
    """A column as an array [rows] or [rows, length]; a view of the Arrow buffers wherever they allow it.

    Raises:
        UnsupportedColumn: nulls, or lists of different lengths; names the column and the file (`origin`).
    """
    array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    if array.null_count:
        raise UnsupportedColumn(
            f"expected no nulls in column {name!r}, found {array.null_count} in {origin}: filter them out with "
            f'row_filter = "{name} IS NOT NULL" or fill them in the table'
        )
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = np.frombuffer(array.buffers()[1], dtype=np.uint8)
        return data[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _lists_to_numpy(array, name, origin)
    return _flat(array)


def _lists_to_numpy(array: Any, name: str, origin: str) -> Array:
    offsets = array.offsets.to_numpy()
    lengths = np.diff(offsets)
    if len(lengths) and (lengths != lengths[0]).any():
        raise UnsupportedColumn(
            f"expected lists of one length in column {name!r}, found {lengths.min()} to {lengths.max()} in {origin}: "
            "this version reads fixed-length sequences"
        )
    values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if values.null_count:
        raise UnsupportedColumn(f"expected no nulls inside the lists of column {name!r}, found some in {origin}")
    return _flat(values).reshape(len(array), -1)


def _flat(array: Any) -> Array:
    flat: Array = array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type))
    return flat
