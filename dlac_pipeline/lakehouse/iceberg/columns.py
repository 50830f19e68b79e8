"""Columns of one data file as columns of the table at a pinned schema.

A column is found in the file by Iceberg field id, by the table's name mapping if the file has no ids, else by name. So
renamed, reordered, dropped and widened columns read as the pinned schema names and types them. A column that the file lacks
is its identity partition value, else its initial default, else null. The result has one Arrow type per Iceberg type:
`string`, `binary` and `list`, never their `large_` forms, and 16 bytes for a uuid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as ice
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.name_mapping import MappedField, NameMapping, create_mapping_from_schema

from dlac_pipeline.lakehouse.errors import DataFileUnreadable, NoSuchColumn, UnsupportedColumn
from dlac_pipeline.lakehouse.files.file_format import Bounds, Footer

FIELD_ID = b"PARQUET:field_id"
READ_BY_NAME = "dlac.read-by-name"
"""Property of a table whose data files another writer made: field ids in them are not the table's."""


class NamesFirst(NameMapping):
    """A name mapping that is used even for files with field ids. An empty one has the names of whatever schema is read."""


BY_NAME = NamesFirst([])
_PLAIN: dict[type, pa.DataType] = {
    ice.StringType: pa.string(),
    ice.BinaryType: pa.binary(),
    ice.UUIDType: pa.binary(16),
}
_CHUNK_BYTES = 2**31 - 1
"""The most that the values of one Arrow array of strings can take: its offsets have 32 bits."""
_Found = tuple[pa.Field, MappedField | None]


@contextmanager
def expect(files: str, advice: str = "restore the file, or plan another snapshot") -> Iterator[None]:
    """Turn the errors of pyarrow and of file systems into a `DataFileUnreadable`: expected `files`, found the error."""
    try:
        yield
    except (OSError, pa.ArrowException) as err:
        raise DataFileUnreadable(f"expected {files}, found {type(err).__name__}: {err}; {advice}") from err


def concat_chunks(chunks: Sequence[Any], kind: Any) -> Any:
    """Return one array of chunks of type `kind`, of strings and lists with 64-bit offsets where 32 bits are too few."""
    arrays = [*chunks] or [pa.array([], type=kind)]
    if len(arrays) == 1:
        return arrays[0]
    try:
        return pa.concat_arrays(arrays)
    except pa.ArrowInvalid:
        large = large_form(kind)
        if large == kind:
            raise
        return pa.concat_arrays([array.cast(large) for array in arrays])


def large_form(kind: Any) -> Any:
    """Return the type with 64-bit offsets for a type of strings or lists, and another type unchanged."""
    if pa.types.is_list(kind):
        return pa.large_list(kind.value_field)
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def byte_strings_in(array: Any) -> tuple[Any, Any]:
    """Return offsets and bytes of an array of strings or bytes that has rows.

    The offsets are int32 or int64 [rows + 1], places in the bytes, uint8. Bytes outside of them may be other rows'.
    """
    wide = array.type == large_form(array.type)
    _, offsets, content = array.buffers()
    stored = np.frombuffer(offsets, dtype=np.int64 if wide else np.int32)
    return stored[array.offset : array.offset + len(array) + 1], np.frombuffer(content or b"", dtype=np.uint8)


def lacks_columns(file_schema: pa.Schema, schema: Schema, names: Sequence[str], mapping: NameMapping | None) -> bool:
    """Return True if a file lacks one of the columns `names` of `schema`."""
    in_file = _by_id(file_schema, schema, mapping)
    return any(field.name in names and field.field_id not in in_file for field in schema.fields)


def arrow_type(iceberg_type: ice.IcebergType) -> pa.DataType:
    """The one Arrow type in which columns of an Iceberg type are handed on."""
    if isinstance(iceberg_type, ice.StructType):
        return pa.struct([pa.field(field.name, arrow_type(field.field_type)) for field in iceberg_type.fields])
    if isinstance(iceberg_type, ice.ListType):
        return pa.list_(pa.field("element", arrow_type(iceberg_type.element_type)))
    if isinstance(iceberg_type, ice.MapType):
        return pa.map_(arrow_type(iceberg_type.key_type), arrow_type(iceberg_type.value_type))
    plain = _PLAIN.get(type(iceberg_type))
    return schema_to_pyarrow(iceberg_type, include_field_ids=False) if plain is None else plain


@dataclass(frozen=True)
class _Column:
    """Source of one column: the file's `in_file` of type `found`, with the name mapping of fields below it, or a constant."""

    field: ice.NestedField
    in_file: str | None = None
    found: pa.DataType | None = None
    mapped: MappedField | None = None
    constant: Any = None

    @cached_property
    def wanted(self) -> Any:
        return arrow_type(self.field.field_type)


class FileColumns:
    """Reading of columns from one file. `in_file` are the file's columns to read, `absent` are columns that are constant here."""

    def __init__(self, columns: Sequence[_Column]) -> None:
        self._columns = tuple(columns)
        self.in_file: list[str] = [column.in_file for column in columns if column.in_file is not None]
        self.absent: list[str] = [column.field.name for column in columns if column.in_file is None]

    @classmethod
    def of(
        cls,
        file_schema: pa.Schema,
        schema: Schema,
        names: Sequence[str],
        name_mapping: NameMapping | None = None,
        partition_values: Mapping[int, Any] = {},
    ) -> "FileColumns":
        """The way from a file with `file_schema` to the columns `names` of `schema`.

        `partition_values` are the file's identity partition values by source field id. Raises `NoSuchColumn` if the schema
        lacks a name, or the file a required column without default, and `UnsupportedColumn` for a type that is not promoted.
        """
        top_level = {field.name: field for field in schema.fields}
        for name in names:
            if name not in top_level:
                raise NoSuchColumn.of("the schema", name, list(top_level))
        in_file = _by_id(file_schema, schema, name_mapping)
        return cls([_column(top_level[name], in_file, partition_values) for name in names])

    def align(self, table: pa.Table, rows: int) -> pa.Table:
        """Return the read columns in the table's names and types, of `rows` each. Raises `UnsupportedColumn` for other values."""
        return pa.table({column.field.name: _aligned(column, table, rows) for column in self._columns})

    def nulls(self, footer: Footer, unit: int) -> dict[str, int]:
        """Return the number of nulls by column: of columns whose count the footer has, and of columns that the file lacks."""
        counted = {name: bounds.nulls for name, bounds in self.bounds(footer, unit).items() if bounds.nulls is not None}
        absent = [each.field.name for each in self._columns if each.in_file is None and each.constant is None]
        return {**counted, **dict.fromkeys(absent, footer.rows[unit])}

    def values_in_lists(self, footer: Footer, unit: int) -> dict[str, int]:
        """Return the number of values of columns of lists, where the footer counts them and no list is null or empty."""
        of_file = {each.field.name: each.in_file for each in self._columns if each.in_file is not None}
        counted = {name: footer.values(unit, in_file) for name, in_file in of_file.items()}
        return {name: found[0] for name, found in counted.items() if found is not None and found[1] == 0}

    def bounds(self, footer: Footer, unit: int) -> dict[str, Bounds]:
        """Return the file's statistics of those columns, by name, that are in the file and not nested."""
        found = {}
        for column in self._columns:
            if column.in_file is not None and not pa.types.is_nested(column.found):
                found[column.field.name] = footer.bounds(unit, column.in_file, column.wanted)
        return {name: bounds for name, bounds in found.items() if bounds is not None}


def name_mapping_of(table: Table) -> NameMapping | None:
    """Return the table's name mapping, for files without field ids, or None. Raises `UnsupportedColumn` for a broken one."""
    try:
        mapping = table.name_mapping()
    except ValueError as err:
        raise UnsupportedColumn(
            f"expected property 'schema.name-mapping.default' of {'.'.join(table.name())!r} to be a name mapping, found "
            f"{table.properties.get('schema.name-mapping.default')!r}: set it right or remove it"
        ) from err
    return mapping if READ_BY_NAME not in table.properties else NamesFirst([] if mapping is None else mapping.root)


def field_ids(file_schema: pa.Schema) -> dict[int, pa.Field]:
    """The top-level fields of a data file that carry an Iceberg field id, by that id."""
    return {int(field.metadata[FIELD_ID]): field for field in file_schema if FIELD_ID in (field.metadata or {})}


def _by_id(file_schema: pa.Schema, schema: Schema, mapping: NameMapping | None) -> dict[int, _Found]:
    """The file's top-level fields by field id, each with the mapping that gave it the id."""
    with_ids = field_ids(file_schema)
    if with_ids and not isinstance(mapping, NamesFirst):
        return {field_id: (field, None) for field_id, field in with_ids.items()}
    if mapping is None or mapping == BY_NAME:
        mapping = create_mapping_from_schema(schema)
    mapped = {name: entry for entry in mapping for name in entry.names if entry.field_id is not None}
    fields = ((mapped[field.name], field) for field in file_schema if field.name in mapped)
    return {entry.field_id: (field, entry) for entry, field in fields if entry.field_id is not None}


def _has_fields(arrow: pa.DataType) -> bool:
    return _has_fields(arrow.value_type) if is_list(arrow) else pa.types.is_struct(arrow) or pa.types.is_map(arrow)


def _column(field: ice.NestedField, in_file: Mapping[int, _Found], partition_values: Mapping[int, Any]) -> _Column:
    if field.field_id in in_file:
        found, mapped = in_file[field.field_id]
        if not _has_fields(found.type) and not _fits(found.type, arrow_type(field.field_type)):
            raise UnsupportedColumn(
                f"expected column {field.name!r} as {field.field_type} or a type that promotes to it, found {found.type} "
                f"in the data file (its column {found.name!r}): rewrite the file"
            )
        return _Column(field, in_file=found.name, found=found.type, mapped=mapped)
    constant = partition_values.get(field.field_id, field.initial_default)
    if constant is None and field.required and field.field_id not in partition_values:
        raise NoSuchColumn(
            f"expected required column {field.name!r} (field id {field.field_id}) in a data file, found neither it nor an "
            "initial default: rewrite the table or leave the column out"
        )
    return _Column(field, constant=constant)


def _fits(found: Any, wanted: Any) -> bool:
    """Return True if a value of type `found` is one of type `wanted`, as Iceberg promotes types."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    if isinstance(found, pa.BaseExtensionType):
        found = found.storage_type
    if is_list(wanted):
        return is_list(found) and _fits(found.value_type, wanted.value_type)
    promotes = next((promotes for is_a, promotes in _PROMOTIONS if is_a(wanted)), None)
    return pa.types.is_null(found) or found == wanted or (promotes is not None and promotes(found, wanted))


def is_list(arrow: pa.DataType) -> bool:
    """Return True for a type of lists, also of lists with 64-bit offsets or of one size."""
    return bool(pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow))


def _is_bytes(arrow: pa.DataType, _: pa.DataType | None = None) -> bool:
    return arrow in {pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary_view()}


def _is_narrower_integer(found: Any, wanted: Any) -> bool:
    if pa.types.is_unsigned_integer(found):
        return bool(found.bit_width < wanted.bit_width)
    return bool(pa.types.is_integer(found) and found.bit_width <= wanted.bit_width)


def _is_narrower_decimal(found: Any, wanted: Any) -> bool:
    return bool(pa.types.is_decimal(found) and found.scale == wanted.scale and found.precision <= wanted.precision)


_PROMOTIONS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Any], bool]], ...] = (
    (pa.types.is_integer, _is_narrower_integer),
    (pa.types.is_floating, lambda found, wanted: pa.types.is_floating(found) and found.bit_width <= wanted.bit_width),
    (pa.types.is_decimal, _is_narrower_decimal),
    (pa.types.is_timestamp, lambda found, _: pa.types.is_timestamp(found) or pa.types.is_date(found)),
    (pa.types.is_time, lambda found, _: pa.types.is_time(found)),
    (pa.types.is_date, lambda found, _: pa.types.is_date(found)),
    (_is_bytes, _is_bytes),
)


def _aligned(column: _Column, table: pa.Table, rows: int) -> Any:
    wanted = column.wanted
    if column.in_file is None:
        return _repeated(column.constant, wanted, rows)
    found = table[column.in_file]
    try:
        if not _has_fields(column.found):
            return _cast(found, wanted)
        chunks = [_projected(chunk, column.found, column.field.field_type, column.mapped) for chunk in found.chunks]
        return pa.chunked_array(chunks, type=wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
        raise UnsupportedColumn(
            f"expected column {column.field.name!r} as {column.field.field_type}, found {found.type} in the data file "
            f"(its column {column.in_file!r}): {err}"
        ) from err


def _repeated(value: Any, wanted: pa.DataType, rows: int) -> Any:
    if value is None:
        return pa.nulls(rows, type=wanted)
    return pa.repeat(pa.scalar(value.bytes if isinstance(value, UUID) else value, type=wanted), rows)


def _cast(array: Any, wanted: pa.DataType) -> Any:
    if array.type == wanted:
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.cast(array.type.storage_type)
    if pa.types.is_timestamp(wanted):
        # Nanoseconds of a file lose their last digits in a table of microseconds, as in every engine.
        return array.cast(options=pc.CastOptions(wanted, allow_time_truncate=True))
    if large_form(wanted) == array.type and wanted != array.type and not pa.types.is_list(wanted):
        chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
        parts = [_narrow(part, wanted) for chunk in chunks for part in _split_strings(chunk)]
        whole = pa.chunked_array(parts, type=wanted)
        return whole if isinstance(array, pa.ChunkedArray) else concat_chunks(whole.chunks, wanted)
    return array.cast(wanted)


def _split_strings(array: Any) -> list[Any]:
    """Yield slices of an array of large strings that each fit 32-bit offsets. A value that does not fit is one alone."""
    if not len(array):
        return []
    offsets, _ = byte_strings_in(array)
    starts = [0]
    while offsets[-1] - offsets[starts[-1]] > _CHUNK_BYTES:
        fits = int(np.searchsorted(offsets, offsets[starts[-1]] + _CHUNK_BYTES, side="right")) - 1
        starts.append(max(fits, starts[-1] + 1))
    return [array.slice(start, stop - start) for start, stop in zip(starts, [*starts[1:], len(array)], strict=True)]


def _narrow(array: Any, wanted: pa.DataType) -> Any:
    """Large strings with offsets of 32 bits, over the same bytes."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > _CHUNK_BYTES:
        return array.cast(wanted)  # raises: one value is too long
    valid = pa.array(np.asarray(array.is_valid())).buffers()[1] if array.null_count else None
    values = (array.buffers()[2] or pa.py_buffer(b"")).slice(first, last - first)
    return pa.Array.from_buffers(wanted, len(array), [valid, pa.py_buffer((offsets - first).astype(np.int32)), values])


def _projected(array: Any, found: Any, want: ice.IcebergType, mapped: MappedField | None) -> Any:
    """Return a nested array of the file's type `found` with the fields of `want`, found by id. Nulls stay nulls."""
    if isinstance(want, ice.StructType) and pa.types.is_struct(found):
        return _struct(array, found, want, mapped)
    if isinstance(want, ice.ListType) and is_list(found):
        array = array.cast(pa.list_(array.type.value_field))
        values = _projected(array.values, found.value_type, want.element_type, _mapped_below(mapped, want.element_id))
        return pa.ListArray.from_arrays(_offsets(array), values, type=arrow_type(want), mask=_nulls(array))
    if isinstance(want, ice.MapType) and pa.types.is_map(found):
        keys = _projected(array.keys, found.key_type, want.key_type, _mapped_below(mapped, want.key_id))
        items = _projected(array.items, found.item_type, want.value_type, _mapped_below(mapped, want.value_id))
        return pa.MapArray.from_arrays(_offsets(array), keys, items, type=arrow_type(want), mask=_nulls(array))
    if not _fits(found, arrow_type(want)):
        raise pa.ArrowInvalid(f"{found} where {want} was expected")
    return _cast(array, arrow_type(want))


def _struct(array: Any, found: Any, want: ice.StructType, mapped: MappedField | None) -> Any:
    places = {_id_below(child, mapped): place for place, child in enumerate(found)}
    children = []
    for field in want.fields:
        place = places.get(field.field_id)
        if place is None and field.required and field.initial_default is None:
            raise NoSuchColumn(
                f"expected required field {field.name!r} (field id {field.field_id}) inside a column of a data file, found "
                f"{found}: rewrite the table or leave the column out"
            )
        if place is None:
            children.append(_repeated(field.initial_default, arrow_type(field.field_type), len(array)))
        else:
            below = _mapped_below(mapped, field.field_id)
            children.append(_projected(array.field(place), found.field(place).type, field.field_type, below))
    return pa.StructArray.from_arrays(children, fields=list(arrow_type(want)), mask=_nulls(array))


def _id_below(child: pa.Field, mapped: MappedField | None) -> int | None:
    """The field id of a struct's field in the file: the field's id, or the id that the mapping gives its name."""
    if mapped is None:
        own = (child.metadata or {}).get(FIELD_ID)
        return None if own is None else int(own)
    return next((entry.field_id for entry in mapped.fields if child.name in entry.names), None)


def _mapped_below(mapped: MappedField | None, field_id: int) -> MappedField | None:
    """The mapping of a field below: one that maps nothing where there is none."""
    if mapped is None:
        return None
    nothing = mapped.model_copy(update={"fields": []})
    return next((entry for entry in mapped.fields if entry.field_id == field_id), nothing)


def _offsets(array: Any) -> Any:
    return pa.array(array.offsets.to_numpy())  # a copy: Arrow takes no mask beside sliced offsets


def _nulls(array: Any) -> Any:
    return array.is_null() if array.null_count else None
