"""Columns of a Parquet file as columns of an Iceberg table: types with equal values, and columns that have none."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, _pyarrow_to_schema_without_ids
from pyiceberg.types import NestedField

from dlac_pipeline.lakehouse.iceberg.columns import field_ids, is_list


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundColumns:
    """Columns of one file, without ids. A column without a type, in which all values are null, is in neither."""

    fit: tuple[NestedField, ...]
    unfit: dict[str, str]
    """Name of a column that Iceberg cannot have -> the reason."""
    with_ids: bool
    """True if the file has field ids."""


def find_columns(file: pq.ParquetFile, exact: pq.ParquetFile) -> FoundColumns:
    """Return the columns of a file. It reads those with nanoseconds, because Iceberg has microseconds.

    `file` is open with INT96 timestamps in microseconds, and `exact` is the same file with INT96 in nanoseconds.
    """
    schema, fit, unfit = file.schema_arrow, [], {}
    for name, times in Counter(schema.names).items():
        if times > 1:
            unfit[name] = f"{times} columns have this name"
            continue
        found = schema.field(name).type
        if _is_untyped(found):
            continue
        try:
            form = _equal_form(found)
            column = _pyarrow_to_schema_without_ids(pa.schema([(name, form)])).fields[0]
        except (TypeError, ValueError, UnsupportedPyArrowTypeException) as err:
            unfit[name] = f"Iceberg has no type for {err.args[0] if type(err) is TypeError else found}"
            continue
        if _has_nanoseconds(exact.schema_arrow.field(name).type) and not _fits(file, exact, name, form):
            unfit[name] = "it has times that 64 bits of microseconds cannot represent"
        else:
            fit.append(column)
    return FoundColumns(fit=tuple(fit), unfit=unfit, with_ids=bool(field_ids(schema)))


def _equal_form(found: Any) -> Any:
    """Return the type with equal values that Iceberg has. All in it is optional. Raises `TypeError` of a type without one."""
    if isinstance(found, pa.BaseExtensionType) and not isinstance(found, pa.UuidType):
        found = found.storage_type
    return next((form(found) for is_a, form in _FORMS if is_a(found)), found)


def _unsigned_form(found: Any) -> pa.DataType:
    if found.bit_width == 64:
        raise TypeError(found)
    return pa.int64() if found.bit_width == 32 else pa.int32()


_FORMS: tuple[tuple[Callable[[Any], bool], Callable[[Any], pa.DataType]], ...] = (
    (pa.types.is_struct, lambda found: pa.struct([pa.field(each.name, _equal_form(each.type)) for each in found])),
    (pa.types.is_map, lambda found: pa.map_(_equal_form(found.key_type), _equal_form(found.item_type))),
    (is_list, lambda found: pa.list_(_equal_form(found.value_type))),
    (pa.types.is_dictionary, lambda found: _equal_form(found.value_type)),
    (pa.types.is_timestamp, lambda found: pa.timestamp("us", None if found.tz is None else "UTC")),
    (pa.types.is_time, lambda _: pa.time64("us")),
    (pa.types.is_date, lambda _: pa.date32()),
    (pa.types.is_decimal32, lambda found: pa.decimal128(found.precision, found.scale)),
    (pa.types.is_decimal64, lambda found: pa.decimal128(found.precision, found.scale)),
    (pa.types.is_unsigned_integer, _unsigned_form),
)


def _is_untyped(found: Any) -> bool:
    return bool(pa.types.is_null(found)) or (is_list(found) and _is_untyped(found.value_type))


def _has_nanoseconds(found: Any) -> bool:
    return getattr(found, "unit", None) == "ns" or any(_has_nanoseconds(each.type) for each in _children(found))


def _children(found: Any) -> Iterator[pa.Field]:
    nested = found.storage_type if isinstance(found, pa.BaseExtensionType) else found
    return (nested.field(place) for place in range(nested.num_fields))


def _fits(file: pq.ParquetFile, exact: pq.ParquetFile, name: str, form: Any) -> bool:
    """Return True if microseconds represent all values of a column with nanoseconds exactly. It reads the column."""
    as_int96 = file.schema_arrow.field(name).type != exact.schema_arrow.field(name).type
    for group in range(file.num_row_groups):
        column = file.read_row_group(group, columns=[name])[name]
        if as_int96:
            fine = exact.read_row_group(group, columns=[name])[name]
            # Far dates wrap around in 64 bits of nanoseconds, the same way in both.
            if not fine.equals(column.cast(fine.type, safe=False)):
                return False
            continue
        try:
            column.cast(form)
        except pa.ArrowInvalid:
            return False
    return True
