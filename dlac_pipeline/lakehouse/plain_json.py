"""JSON that every reader takes: without NaN and Infinity, which Python writes and no standard knows."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def strict_json(value: object, *, default: Callable[[Any], object] = str, indent: int | None = None) -> str:
    """Return JSON text. A number that is not finite becomes null. `default` converts types that JSON lacks."""
    return json.dumps(finite(value, default=default), allow_nan=False, indent=indent)


def finite(value: object, *, default: Callable[[Any], object] = str) -> object:
    """Return a value of plain types alone, in which None replaces every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): finite(each, default=default) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, default=default) for each in value]
    converted = default(value)
    is_plain = converted is None or isinstance(converted, str | int | float | list | tuple | Mapping)
    return finite(converted if is_plain else str(converted), default=default)
