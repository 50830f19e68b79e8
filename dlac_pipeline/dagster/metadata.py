"""Pictures, tables and SQL as Dagster shows them on a page."""

import base64
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from pyiceberg.schema import Schema


def picture(title: str, png: bytes) -> dg.MarkdownMetadataValue:
    """A PNG as metadata that holds it."""
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{base64.b64encode(png).decode()})")


def sql_metadata(query: str) -> dg.MarkdownMetadataValue:
    """A query for `dlac sql`."""
    return dg.MetadataValue.md(f"```sql\n{query}\n```")


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, dg.TableMetadataValue]:
    """Return rows as a table under their name. Empty without rows."""
    records = [dg.TableRecord({key: _metadata_value(value) for key, value in row.items()}) for row in rows]
    return {name: dg.MetadataValue.table(records)} if records else {}


def column_schema(schema: "Schema") -> dg.TableSchema:
    """Return the columns of an Iceberg table with their types and documentation."""
    columns = [dg.TableColumn(each.name, str(each.field_type), each.doc) for each in schema.fields]
    return dg.TableSchema(columns=columns)


def _metadata_value(value: object) -> str | int | float | bool:
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else str(value)  # Dagster keeps it as JSON
    if isinstance(value, (bool, int)):
        return value
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)
