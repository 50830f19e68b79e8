"""Manifest entry of a Parquet file, made from its footer: rows, places of row groups, and bounds of flat columns."""

from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import BinaryType, IcebergType, NestedField, StringType
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string, truncate_upper_bound_text_string

from dlac_pipeline.lakehouse.files.file_format import Bounds
from dlac_pipeline.lakehouse.files.parquet import ParquetFooter
from dlac_pipeline.lakehouse.filters.literals import from_arrow, unit_ns
from dlac_pipeline.lakehouse.iceberg.columns import BY_NAME, FileColumns

_BOUND_LENGTH = 16
"""Characters or bytes that are kept of a bound, as Iceberg does by default."""


def describe_file(
    parquet: pq.ParquetFile, schema: Schema, *, address: str, size: int, spec_id: int, partition: Record
) -> DataFile:
    """Return the manifest's record of a file at an address, which is read as `schema`."""
    footer = parquet.metadata
    names = [field.name for field in schema.fields if field.field_type.is_primitive]
    # A partition key is in no file, and needs no metrics.
    keys = {field.field_id: None for field in schema.fields}
    columns = FileColumns.of(parquet.schema_arrow, schema, names, BY_NAME, keys)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    rows = sum(group.num_rows for group in groups)  # some writers leave the count of the file 0
    own = ParquetFooter(parquet)
    found = [(count, columns.bounds(own, unit)) for unit, count in enumerate(own.rows) if count]
    known = [field for field in schema.fields if found and all(field.name in bounds for _, bounds in found)]
    metrics = [_metrics(field, [(count, bounds[field.name]) for count, bounds in found]) for field in known]
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=address,
        file_format=FileFormat.PARQUET,
        partition=partition,
        record_count=rows,
        file_size_in_bytes=size,
        spec_id=spec_id,
        split_offsets=sorted(_offset(group.column(0)) for group in groups if group.num_columns),
        value_counts={field.field_id: rows for field in known},
        null_value_counts=_by_id(known, [nulls for nulls, _, _ in metrics]),
        lower_bounds=_by_id(known, [lower for _, lower, _ in metrics]),
        upper_bounds=_by_id(known, [upper for _, _, upper in metrics]),
    )


def _by_id(fields: list[NestedField], values: list[Any]) -> dict[int, Any]:
    return {field.field_id: value for field, value in zip(fields, values, strict=True) if value is not None}


def _offset(chunk: pq.ColumnChunkMetaData) -> int:
    """Return the place of a row group's first page, which is its dictionary's page if it has one."""
    return int(min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset))


def _metrics(field: NestedField, found: list[tuple[int, Bounds]]) -> tuple[int | None, bytes | None, bytes | None]:
    """Return nulls, least and greatest value over all row groups, each with its rows. None is unknown."""
    counts = [bounds.nulls for _, bounds in found]
    nulls = None if None in counts else sum(count for count in counts if count is not None)
    with_values = [bounds for rows, bounds in found if bounds.nulls != rows]
    if not with_values or any(bounds.lower is None or bounds.upper is None for bounds in with_values):
        return nulls, None, None
    kind = field.field_type
    lower = min((bounds.lower for bounds in with_values), key=partial(from_arrow, kind))
    upper = max((bounds.upper for bounds in with_values), key=partial(from_arrow, kind))
    return nulls, _stored(kind, _cut(_value(kind, lower))), _upper(kind, _value(kind, upper))


def _value(kind: IcebergType, scalar: Any) -> Any:
    return scalar.as_py() if unit_ns(kind) is None else scalar.value


def _stored(kind: Any, value: Any) -> bytes | None:
    return None if value is None else to_bytes(kind, value)


def _cut(value: Any) -> Any:
    return value[:_BOUND_LENGTH] if isinstance(value, str | bytes) else value


def _upper(kind: IcebergType, value: Any) -> bytes | None:
    """Return an upper bound. Of a long text it is a greater one that is as long as bounds are, if there is one."""
    if not isinstance(kind, StringType | BinaryType):
        return _stored(kind, value)
    is_text = isinstance(kind, StringType)
    cut: Any = truncate_upper_bound_text_string if is_text else truncate_upper_bound_binary_string
    with suppress(UnicodeEncodeError):  # pyiceberg takes a surrogate for the next character
        return _stored(kind, cut(value, _BOUND_LENGTH))
    return None
