"""Conversion of a literal to values of a column's type: the greatest that is not above it, its equal, the least not below it.

A value is comparable as Python compares it: integers for numbers without a fraction, decimals (unscaled), dates and times
(in the unit of their type), floats, text, bytes (also of a uuid), and booleans.
"""

import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, DecimalException
from fractions import Fraction
from math import ceil, floor, inf, isinf, isnan
from typing import Any
from uuid import UUID

from pyiceberg import types as ice

Value = Decimal | str | bytes | bool
DAY_NS = 86_400_000_000_000
FLOATS = (ice.FloatType, ice.DoubleType)
INTEGERS = (ice.IntegerType, ice.LongType)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_INFINITE = re.compile(r"([+-]?)inf(?:inity)?", re.IGNORECASE)
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
_CLOCK = re.compile(r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?")
_ZONE = re.compile(r"([+-])(\d\d):?(\d\d)?")
_UNITS_NS: dict[type, int] = {
    ice.DateType: DAY_NS,
    **dict.fromkeys((ice.TimeType, ice.TimestampType, ice.TimestamptzType), 1_000),
    **dict.fromkeys((ice.TimestampNanoType, ice.TimestamptzNanoType), 1),
}
_ZONED = (ice.TimestamptzType, ice.TimestamptzNanoType)
_WIDTHS: dict[type, int] = {ice.IntegerType: 32, ice.DateType: 32}
_FLOAT_MAX = {ice.FloatType: struct.unpack("<f", b"\xff\xff\x7f\x7f")[0], ice.DoubleType: 1.7976931348623157e308}
_FARTHEST = 400  # decimal places: beyond every type
_HINTS: dict[type, str] = {
    ice.BooleanType: "true or false",
    ice.StringType: "text in single quotes",
    **dict.fromkeys((ice.BinaryType, ice.FixedType), "text in single quotes, or bytes such as X'0aff'"),
    ice.UUIDType: "a UUID in single quotes",
    ice.DateType: "a date such as DATE '2024-01-31'",
    ice.TimeType: "a time such as TIME '12:30:00'",
    ice.TimestampType: "a timestamp without a zone such as TIMESTAMP '2024-01-31 12:30:00'",
    ice.TimestampNanoType: "a timestamp without a zone such as TIMESTAMP '2024-01-31 12:30:00'",
    ice.TimestamptzType: "a timestamp such as TIMESTAMP '2024-01-31 12:30:00+00:00'",
    ice.TimestamptzNanoType: "a timestamp such as TIMESTAMP '2024-01-31 12:30:00+00:00'",
}


@dataclass(frozen=True, slots=True)
class LiteralPlace:
    """Place of a literal among the values of a type, or None where the type has no such value."""

    at_most: Any
    equal: Any
    at_least: Any


def place_of(kind: ice.IcebergType, literal: Value) -> LiteralPlace | None:
    """Return the place of a literal among the values of `kind`, or None if they cannot be compared."""
    if isinstance(kind, ice.DecimalType):
        greatest = 10**kind.precision - 1
        return _on_grid(_number(literal), 10**kind.scale, (-greatest, greatest))
    if isinstance(kind, INTEGERS):
        return _on_grid(_number(literal), 1, limits_of(kind))
    if isinstance(kind, FLOATS):
        return _among_floats(kind, literal)
    if type(kind) in _UNITS_NS:
        return _on_grid(_nanoseconds(kind, literal), Fraction(1, _UNITS_NS[type(kind)]), limits_of(kind))
    value = _exact(kind, literal)
    return None if value is None else LiteralPlace(value, value, value)


def hint_for(kind: ice.IcebergType) -> str:
    """Return how literals of a type are written."""
    return _HINTS.get(type(kind), "a number" if kind.is_primitive else "IS NULL or IS NOT NULL")


def from_arrow(kind: ice.IcebergType, scalar: Any) -> Any:
    """Return the comparable value of an Arrow scalar of a column's type."""
    if type(kind) in _UNITS_NS:
        return scalar.value
    return from_python(kind, scalar.as_py())


def from_python(kind: ice.IcebergType, value: Any) -> Any:
    """Return the comparable value of a partition value or an Arrow value as Python has it."""
    if isinstance(value, Decimal) and isinstance(kind, ice.DecimalType):
        sign, digits, exponent = value.as_tuple()
        unscaled = Fraction(int("".join(map(str, digits)) or "0")) * Fraction(10) ** (int(exponent) + kind.scale)
        return int(-unscaled if sign else unscaled)
    return value.bytes if isinstance(value, UUID) else value


def from_bytes(kind: ice.IcebergType, stored: bytes) -> Any:
    """Return the comparable value of a bound as Iceberg stores it, perhaps before its column was widened, or None."""
    if isinstance(kind, FLOATS):
        value = struct.unpack("<f" if len(stored) == 4 else "<d", stored)[0]
        return None if isnan(value) else value
    if isinstance(kind, ice.StringType):
        with suppress(UnicodeDecodeError):  # cut in the middle of a character
            return stored.decode()
        return None
    return stored if isinstance(kind, ice.BinaryType | ice.FixedType | ice.UUIDType) else _whole(kind, stored)


def _whole(kind: ice.IcebergType, stored: bytes) -> int:
    if isinstance(kind, ice.DecimalType):
        return int.from_bytes(stored, "big", signed=True)
    value = int.from_bytes(stored, "little", signed=True)
    was_date = len(stored) == 4 and type(kind) in _UNITS_NS and not isinstance(kind, ice.DateType)
    return value * DAY_NS // _UNITS_NS[type(kind)] if was_date else value


def to_python(kind: ice.IcebergType, value: Any) -> Any:
    """Return a comparable value as Arrow and pyiceberg take it: the opposite of `from_python`."""
    if isinstance(kind, ice.DecimalType):
        return Decimal((int(value < 0), tuple(int(digit) for digit in str(abs(value))), -kind.scale))
    return value


def unit_ns(kind: ice.IcebergType) -> int | None:
    """Return the nanoseconds in one unit of a type of dates or times, or None for other types."""
    return _UNITS_NS.get(type(kind))


def limits_of(kind: ice.IcebergType) -> tuple[int, int]:
    """Return the least and the greatest value of a type of integers."""
    half = 2 ** (_WIDTHS.get(type(kind), 64) - 1)
    return -half, half - 1


def _on_grid(exact: Fraction | None, scale: int | Fraction, limits: tuple[int, int]) -> LiteralPlace | None:
    """The place of a number among the integers within `limits`, each standing for `1 / scale`."""
    if exact is None:
        return None
    (least, greatest), units = limits, exact * scale
    low, high = floor(units), ceil(units)
    return LiteralPlace(
        None if low < least else min(low, greatest),
        low if low == high and least <= low <= greatest else None,
        None if high > greatest else max(high, least),
    )


def _number(literal: Value) -> Fraction | None:
    if isinstance(literal, str) and _NUMBER.fullmatch(literal.strip()):
        try:
            literal = Decimal(literal.strip())
        except DecimalException:
            return None
    if not isinstance(literal, Decimal):
        return None
    if literal and abs(literal.adjusted()) > _FARTHEST:  # its exact value could fill the memory
        beyond = Fraction(10) ** (_FARTHEST if literal.adjusted() > 0 else -_FARTHEST)
        return -beyond if literal < 0 else beyond
    return Fraction(literal)


def _among_floats(kind: ice.FloatType | ice.DoubleType, literal: Value) -> LiteralPlace | None:
    greatest = _FLOAT_MAX[type(kind)]
    infinite = _INFINITE.fullmatch(literal.strip()) if isinstance(literal, str) else None
    if infinite is not None:
        value = -inf if infinite.group(1) == "-" else inf
        return LiteralPlace(value, value, value)
    exact = _number(literal)
    if exact is None:
        return None
    try:
        value = float(exact)
        if isinstance(kind, ice.FloatType):
            value = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        value = inf if exact > 0 else -inf
    if isinf(value):  # between the greatest finite value and infinity
        return LiteralPlace(greatest, None, inf) if value > 0 else LiteralPlace(-inf, None, -greatest)
    return LiteralPlace(value, value, value)


def _nanoseconds(kind: ice.IcebergType, literal: Value) -> Fraction | None:
    """Nanoseconds since the epoch, or since midnight, of a date or time in quotes."""
    if not isinstance(literal, str):
        return None
    text = literal.strip()
    if isinstance(kind, ice.TimeType):
        clock = _CLOCK.fullmatch(text)
        return None if clock is None else _clock_ns(clock)
    day = _DATE.match(text)
    if day is None:
        return None
    try:
        since = Fraction((date(*map(int, day.groups())) - date(1970, 1, 1)).days * DAY_NS)
    except ValueError:
        return None
    rest = text[day.end() :]
    if not rest:
        return since
    clock = _CLOCK.match(rest.lstrip("tT ")) if rest[0] in "tT " else None
    within = None if clock is None else _clock_ns(clock)
    zone = None if clock is None else _zone_ns(clock.string[clock.end() :].strip(), zoned=isinstance(kind, _ZONED))
    return None if within is None or zone is None else since + within - zone


def _clock_ns(clock: re.Match[str]) -> Fraction | None:
    hours, minutes, seconds = (int(part or 0) for part in clock.groups()[:3])
    if hours > 23 or minutes > 59 or seconds > 59:
        return None
    return Fraction(((hours * 60 + minutes) * 60 + seconds) * 10**9 + int((clock.group(4) or "").ljust(9, "0")))


def _zone_ns(text: str, *, zoned: bool) -> int | None:
    """Return the offset from UTC. No offset means UTC, and a column without a zone takes none."""
    if not text:
        return 0
    if not zoned:
        return None
    if text in ("Z", "z"):
        return 0
    offset = _ZONE.fullmatch(text)
    if offset is None or int(offset.group(2)) > 18 or int(offset.group(3) or 0) > 59:
        return None
    minutes = int(offset.group(2)) * 60 + int(offset.group(3) or 0)
    return (-1 if offset.group(1) == "-" else 1) * minutes * 60 * 10**9


def _exact(kind: ice.IcebergType, literal: Value) -> Any:
    if isinstance(kind, ice.BooleanType):
        words = {"true": True, "false": False}
        return words.get(literal.strip().lower()) if isinstance(literal, str) else _of(bool, literal)
    if isinstance(kind, ice.StringType):
        return _of(str, literal)
    if isinstance(kind, ice.BinaryType | ice.FixedType):
        return literal.encode() if isinstance(literal, str) else _of(bytes, literal)
    if isinstance(kind, ice.UUIDType) and isinstance(literal, str):
        try:
            return UUID(literal.strip()).bytes
        except ValueError:
            return None
    return None


def _of(kind: type, literal: Value) -> Any:
    return literal if isinstance(literal, kind) else None
