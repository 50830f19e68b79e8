"""Writer of filters: values of rows become a filter that selects these rows, the opposite of `grammar`."""

import math
import re
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from pyiceberg.types import NestedField, UUIDType

_PLAIN = re.compile(
    r"(?!(?:and|or|not|in|like|between|is|null|true|false|date|time|timestamp|decimal|nan)$)[a-z_][a-z0-9_]*"
)


def filter_of_rows(fields: Sequence[NestedField], rows: Sequence[Sequence[Any]]) -> str:
    """Return the filter for rows with these values of some primitive columns, each value as Arrow gives it to Python."""
    conditions = [[_condition(*pair) for pair in zip(fields, row, strict=True)] for row in rows]
    parts = list(dict.fromkeys(" AND ".join(each) for each in conditions))
    if len(fields) > 1 and len(parts) > 1:
        return " OR ".join(f"({part})" for part in parts)
    begins = _name(fields[0].name) + " = "
    literals = [part.removeprefix(begins) for part in parts if part.startswith(begins)]
    if len(fields) == 1 and len(literals) > 1:
        others = [part for part in parts if not part.startswith(begins)]
        parts = [f"{_name(fields[0].name)} IN ({', '.join(literals)})", *others]
    return " OR ".join(parts)


def _condition(field: NestedField, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return f"{_name(field.name)} IS {'NULL' if value is None else 'NAN'}"
    return f"{_name(field.name)} = {_literal(field, value)}"


def _name(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'


def _literal(field: NestedField, value: Any) -> str:
    if isinstance(value, bytes) and isinstance(field.field_type, UUIDType):
        value = UUID(bytes=value)
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, int | Decimal) or (isinstance(value, float) and math.isfinite(value)):
        return f"{value:f}" if isinstance(value, Decimal) else repr(value).lower()
    text = value.isoformat() if isinstance(value, date | time) else str(value)
    return "'" + text.replace("'", "''") + "'"
