"""Schemas for tests: optional columns, numbered in their order."""

from collections.abc import Mapping

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, NestedField

from dlac_pipeline.lakehouse.iceberg.columns import arrow_type


def optional_fields(kinds: Mapping[str, IcebergType], *, first_id: int = 1) -> list[NestedField]:
    """Return optional columns of these types, by name."""
    return [NestedField(at, name, kind, required=False) for at, (name, kind) in enumerate(kinds.items(), first_id)]


def arrow_fields(schema: Schema) -> list[pa.Field]:
    """Return the columns of a schema in Arrow."""
    return [pa.field(each.name, arrow_type(each.field_type)) for each in schema.fields]
