"""Random tables and filters, with an oracle in plain Python. It has dates and times as integers in the unit of their type."""

import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from math import inf, isnan, nan
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from pyiceberg import transforms
from pyiceberg import types as ice
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema

from tests.iceberg_schemas import arrow_fields, optional_fields
from tests.integration.iceberg_writer import HandTable

DAY_US = 86_400_000_000
FLOAT_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
NUMBERS = {"i": ice.IntegerType(), "l": ice.LongType(), "f": ice.FloatType(), "d": ice.DoubleType()}
BYTES = {"s": ice.StringType(), "bin": ice.BinaryType(), "fx": ice.FixedType(3), "u": ice.UUIDType()}
MOMENTS = {"day": ice.DateType(), "clock": ice.TimeType(), "ts": ice.TimestampType(), "tz": ice.TimestamptzType()}
PRICES = {"price": ice.DecimalType(9, 2), "big": ice.DecimalType(38, 10)}
SCHEMA = Schema(
    *optional_fields({**NUMBERS, "b": ice.BooleanType(), **BYTES, **MOMENTS, **PRICES, "a.b": ice.LongType()}),
    ice.NestedField(
        17,
        "st",
        ice.StructType(
            *optional_fields({"n": ice.LongType(), "x.y": ice.StringType()}, first_id=18),
            ice.NestedField(
                20, "deep", ice.StructType(*optional_fields({"d": ice.DoubleType()}, first_id=21)), required=False
            ),
        ),
        required=False,
    ),
    *optional_fields({"list": ice.ListType(23, ice.LongType(), element_required=False)}, first_id=22),
)


def float32(value: float) -> float:
    """The nearest value of 32 bits."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def micros(year: int, month: int = 1, day: int = 1, **more: Any) -> int:
    """Microseconds since 1970."""
    return (datetime(year, month, day, **more) - datetime(1970, 1, 1)) // timedelta(microseconds=1)


def unscaled(value: int, scale: int) -> Decimal:
    """A decimal of more digits than Python's arithmetic keeps."""
    return Decimal((int(value < 0), tuple(int(digit) for digit in str(abs(value))), -scale))


WHOLE = [0, 1, 2, 5, 9, 10, 11, 99, 100, -1, -2, -10, -11]
REAL = [0.0, -0.0, 0.1, 0.5, 1.0, 1.5, 2.0, -1.0, -0.1, 1e30, -1e30, 123456789.123, 5e-324, nan, nan, inf, -inf]
TIMES = [
    *(0, -1, 1, DAY_US, -DAY_US, 3_600_000_000),
    *(micros(1969, 12, 31, hour=12), micros(1969, 2, 28), micros(1968, 1, 1) - 1),
    *(micros(2024, 1, 31, hour=23, minute=59), micros(2024, 2, 1), micros(2024, 12, 31, microsecond=5)),
    *(micros(1), micros(9999, 12, 31)),
]
POOLS: dict[type, list[Any]] = {
    ice.IntegerType: [*WHOLE, 2**31 - 1, -(2**31), 2**31 - 2],
    ice.LongType: [*WHOLE, 2**63 - 1, -(2**63), 2**53 + 1, -(2**63) + 1],
    ice.FloatType: [float32(x) for x in [*REAL, FLOAT_MAX, -FLOAT_MAX]],
    ice.DoubleType: [*REAL, 1.7976931348623157e308, float(2**53)],
    ice.BooleanType: [True, False],
    ice.StringType: [*"aBbä", "", "aa", "ab", "abc", "abd", "it's", "a%b", "a_b", "axb", "zz\U0010ffff", "\U0001f600x"],
    ice.BinaryType: [b"", b"a", b"ab", b"abc", b"b", b"\xff", b"\xff\xffz", b"\x00"],
    ice.FixedType: [b"aaa", b"aab", b"\xff\xff\xff", b"\x00\x00\x00"],
    ice.UUIDType: [uuid.UUID(int=n).bytes for n in (0, 1, 2**127, 2**128 - 1, 12345678901234567890)],
    ice.DateType: [x // DAY_US for x in TIMES],
    ice.TimeType: [0, 1, 3_600_000_000, 43_200_000_000, DAY_US - 1],
    ice.TimestampType: TIMES,
    ice.TimestamptzType: TIMES,
}  # fmt: skip
DECIMALS = {
    (9, 2): [Decimal(x) for x in ("0.00", "0.10", "1.50", "-1.50", "-0.01", "9999999.99", "-9999999.90", "0.49")],
    (38, 10): [unscaled(x, 10) for x in (0, 1, -1, 15_000_000_000, 10**38 - 1, 10**37, -(10**37))],
}


@dataclass(frozen=True)
class Leaf:
    """A column or a field of a struct: its place in a row, and how filters call it."""

    path: tuple[ice.NestedField, ...]

    @property
    def kind(self) -> ice.IcebergType:
        """Its type."""
        return self.path[-1].field_type

    @property
    def field_id(self) -> int:
        """Its field id."""
        return self.path[-1].field_id

    def of(self, row: dict[str, Any]) -> Any:
        """Its value in a row; null inside of a null struct."""
        found: Any = row
        for each in self.path:
            found = None if found is None else found[each.name]
        return found

    def written(self, random: Random) -> str:
        """A name that a filter may call it by."""
        return ".".join(
            each.name if each.name.isidentifier() and random.random() < 0.7 else f'"{each.name}"' for each in self.path
        )


def leaves_of(fields: Sequence[ice.NestedField], above: tuple[ice.NestedField, ...] = ()) -> Iterator[Leaf]:
    """Every leaf of a schema."""
    for each in fields:
        if isinstance(each.field_type, ice.StructType):
            yield from leaves_of(each.field_type.fields, (*above, each))
        elif each.field_type.is_primitive:
            yield Leaf((*above, each))


LEAVES = list(leaves_of(SCHEMA.fields))


def pool_of(kind: ice.IcebergType) -> list[Any]:
    """Values of a type, its extremes among them."""
    return DECIMALS[kind.precision, kind.scale] if isinstance(kind, ice.DecimalType) else POOLS[type(kind)]


# Partition transforms, written independently of what is tested.

Apply = Callable[[Any], Any]


def wrapped(value: int, bits: int) -> int:
    """An integer that overflows as it does in Java."""
    found: int = (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    return found


def months(days: int) -> int:
    """Return the months from 1970 to a day's month."""
    found = date(1970, 1, 1) + timedelta(days=days)
    return (found.year - 1970) * 12 + found.month - 1


def truncated(kind: ice.IcebergType, width: int) -> Apply:
    """The transform truncate[width]."""
    if isinstance(kind, ice.StringType | ice.BinaryType):
        return lambda value: value[:width]
    if isinstance(kind, ice.DecimalType):
        scale = kind.scale
        return lambda value: unscaled(int(Fraction(value) * 10**scale) // width * width, scale)
    bits = 32 if isinstance(kind, ice.IntegerType) else 64
    return lambda value: wrapped(value - value % width, bits)


def transforms_of(kind: ice.IcebergType) -> list[tuple[transforms.Transform[Any, Any], Apply]]:
    """Every transform of a type, and what it does to a value."""
    found: list[tuple[transforms.Transform[Any, Any], Apply]] = [
        (transforms.IdentityTransform(), lambda value: value),
        (transforms.VoidTransform(), lambda _: None),
    ]
    if not isinstance(kind, ice.BooleanType | ice.FloatType | ice.DoubleType):
        found.append((transforms.BucketTransform(3), transforms.BucketTransform(3).transform(kind)))
    if isinstance(kind, ice.IntegerType | ice.LongType | ice.DecimalType | ice.StringType | ice.BinaryType):
        found += [(transforms.TruncateTransform(width), truncated(kind, width)) for width in (1, 2, 10)]
    if isinstance(kind, ice.DateType | ice.TimestampType | ice.TimestamptzType):
        per_day = 1 if isinstance(kind, ice.DateType) else DAY_US
        found += [
            (transforms.YearTransform(), lambda value: months(value // per_day) // 12),
            (transforms.MonthTransform(), lambda value: months(value // per_day)),
            (transforms.DayTransform(), lambda value: value // per_day),
        ]
        if per_day > 1:
            found.append((transforms.HourTransform(), lambda value: value // 3_600_000_000))
    return found


@dataclass
class Case:
    """A table whose rows are known: `places` are (file, position) of the rows, `merged` holds them in one file."""

    hand: HandTable
    merged: HandTable
    rows: list[dict[str, Any]]
    places: list[tuple[str, int]] = field(default_factory=list)
    parts: dict[int, list[tuple[Leaf, Apply]]] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Leaf]:
        """All leaves. More than half of them are partition columns."""
        partitioned = [leaf for parts in self.parts.values() for leaf, _ in parts]
        return [*LEAVES, *partitioned * (30 // max(len(partitioned), 1))]

    def values(self, random: Random, leaf: Leaf) -> list[Any]:
        """Values to compare a leaf with, mostly from the table."""
        found = [value for row in self.rows if (value := leaf.of(row)) is not None]
        return found if found and random.random() < 0.7 else pool_of(leaf.kind)


def make_case(random: Random, root: Path) -> Case:
    """A table of several files, row groups and partition specs, some with statistics and some without."""
    case = Case(HandTable(root / "t", [SCHEMA], specs=[]), HandTable(root / "merged", [SCHEMA]), [])
    for number in range(random.randint(1, 3)):
        chosen = [
            (leaf, random.choice(transforms_of(leaf.kind)))
            for leaf in random.sample(LEAVES, random.choice([0, 1, 1, 1, 2]))
        ]
        case.parts[number] = [(leaf, apply) for leaf, (_, apply) in chosen]
        fields = [
            PartitionField(leaf.field_id, 1000 + number * 10 + place, transform, f"p{number}_{place}")
            for place, (leaf, (transform, _)) in enumerate(chosen)
        ]
        case.hand.specs.append(PartitionSpec(*fields, spec_id=number))
    for _ in range(random.randint(1, 3)):
        _append(case, random, spec=random.randrange(len(case.hand.specs)))
    footer = random.random() < 0.5
    case.merged.append(arrow_of(case.rows), row_group_rows=10**6, footer=footer, statistics=footer)
    return case


def _append(case: Case, random: Random, *, spec: int) -> None:
    rows = rows_of(random, random.randint(2, 9))
    footer, metrics, row_group_rows = random.random() < 0.7, random.random() < 0.7, random.randint(1, 4)
    by_partition: dict[Any, tuple[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for row in rows:
        key = tuple(None if (value := leaf.of(row)) is None else apply(value) for leaf, apply in case.parts[spec])
        by_partition.setdefault(repr(key), (key, []))[1].append(row)
    for key, part in by_partition.values():
        absent = _absent(case, spec, random)
        schema = Schema(*(each for each in SCHEMA.fields if each.name not in absent))
        written: dict[str, Any] = {"row_group_rows": row_group_rows, "statistics": metrics and footer, "footer": footer}
        path = case.hand.append(arrow_of(part), schema=schema, spec=spec, partition=key, **written)
        case.places += [(path, position) for position in range(len(part))]
        case.rows += part


def _absent(case: Case, spec: int, random: Random) -> set[str]:
    """Identity partition columns that the data file lacks, as files from Hive do."""
    found = {
        leaf.path[0].name
        for (leaf, _), part in zip(case.parts[spec], case.hand.specs[spec].fields, strict=True)
        if isinstance(part.transform, transforms.IdentityTransform) and len(leaf.path) == 1
    }
    return found if random.random() < 0.3 else set()


def rows_of(random: Random, count: int) -> list[dict[str, Any]]:
    """Rows whose columns are all null, constant, of few values, or of any."""
    pools = {leaf.field_id: _pool(random, leaf.kind) for leaf in LEAVES}
    structs_are_null = random.choice([0, 0, 0.3, 1])

    def made(fields: Sequence[ice.NestedField]) -> dict[str, Any]:
        return {each.name: value(each) for each in fields}

    def value(each: ice.NestedField) -> Any:
        if isinstance(each.field_type, ice.StructType):
            return None if random.random() < structs_are_null else made(each.field_type.fields)
        if isinstance(each.field_type, ice.ListType):
            return random.choice([None, [], [1, None]])
        return random.choice(pools[each.field_id])

    return [made(SCHEMA.fields) for _ in range(count)]


def _pool(random: Random, kind: ice.IcebergType) -> list[Any]:
    values = pool_of(kind)
    few: list[Any] = [random.choice(values) for _ in range(random.choice([1, 1, 2, 3, 8]))]
    return random.choice([[None], few, few, [None, *few], [None, *few]])


def arrow_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """The rows as Arrow has them."""
    columns = [pa.array([row[each.name] for row in rows], type=each.type) for each in _ARROW]
    return pa.table(columns, schema=pa.schema(_ARROW))


_ARROW = arrow_fields(SCHEMA)


# Filters: a tree that is written as text and decided for a row.

Truth = bool | None
Decide = Callable[[dict[str, Any]], Truth]


def make_filter(random: Random, case: Case, depth: int = 3) -> tuple[str, Decide]:
    """A filter on columns of a table as text, and what it is for a row: true, false or unknown (None)."""
    shape = random.random()
    if depth == 0 or shape < 0.55:
        return _atom(random, case)
    if shape < 0.7:
        text, decide = make_filter(random, case, depth - 1)
        return f"not ({text})", lambda row: _not(decide(row))
    parts = [make_filter(random, case, depth - 1) for _ in range(random.choice([2, 2, 3]))]
    word, join = random.choice([("and", _all), ("or", _any)])
    return f" {word} ".join(f"({text})" for text, _ in parts), lambda row: join([decide(row) for _, decide in parts])


def _not(found: Truth) -> Truth:
    return None if found is None else not found


def _all(found: Sequence[Truth]) -> Truth:
    return False if False in found else None if None in found else True


def _any(found: Sequence[Truth]) -> Truth:
    return True if True in found else None if None in found else False


def _atom(random: Random, case: Case) -> tuple[str, Decide]:
    if random.random() < 0.02:
        negated = random.random() < 0.5
        return f"list is {'not ' * negated}null", lambda row: (row["list"] is None) != negated
    leaf = random.choice(case.leaves)
    name, made = leaf.written(random), random.random()
    if made < 0.12:
        negated = random.random() < 0.5
        return f"{name} is {'not ' * negated}null", lambda row: (leaf.of(row) is None) != negated
    if made < (0.35 if isinstance(leaf.kind, ice.FloatType | ice.DoubleType) else 0.14):
        negated = random.random() < 0.5
        return f"{name} is {'not ' * negated}nan", lambda row: _is_nan(leaf.of(row), negated)
    if made < 0.35 and isinstance(leaf.kind, ice.StringType):
        return _like(random, name, leaf)
    if made < 0.55:
        return _membership(random, name, leaf, case.values(random, leaf))
    return _comparison(random, name, leaf, case.values(random, leaf))


def _is_nan(value: Any, negated: bool) -> Truth:
    return None if value is None else (isinstance(value, float) and isnan(value)) != negated


def _like(random: Random, name: str, leaf: Leaf) -> tuple[str, Decide]:
    pattern = random.choice(
        ["a%", "%", "ab%", "abc", r"a\%b", "a_b", "_", "%b", "%b%", "a%d", "ä%", "zz%", "", r"a\_b%", "it's"]
    )
    negated = random.random() < 0.4

    def decide(row: dict[str, Any]) -> Truth:
        value = leaf.of(row)
        return None if value is None else _matches(value, pattern) != negated

    quoted = pattern.replace("'", "''")
    return f"{name} {'not ' * negated}like '{quoted}'", decide


def _matches(text: str, pattern: str) -> bool:
    """LIKE by its definition."""
    if not pattern:
        return not text
    if pattern[0] == "%":
        return any(_matches(text[start:], pattern[1:]) for start in range(len(text) + 1))
    if pattern[0] == "\\" and pattern[1:2] in ("%", "_", "\\"):
        return text[:1] == pattern[1] and _matches(text[1:], pattern[2:])
    return bool(text) and pattern[0] in ("_", text[0]) and _matches(text[1:], pattern[1:])


def _membership(random: Random, name: str, leaf: Leaf, values: Sequence[Any]) -> tuple[str, Decide]:
    literals = [literal_of(random, leaf.kind, values) for _ in range(random.randint(1, 4))]
    negated = random.random() < 0.4

    def decide(row: dict[str, Any]) -> Truth:
        value = leaf.of(row)
        return None if value is None else any(_equal(value, key) for _, key in literals) != negated

    return f"{name} {'not ' * negated}in ({', '.join(text for text, _ in literals)})", decide


def _comparison(random: Random, name: str, leaf: Leaf, values: Sequence[Any]) -> tuple[str, Decide]:
    text, key = literal_of(random, leaf.kind, values)
    if random.random() < 0.1:
        other, high = literal_of(random, leaf.kind, values)
        negated = random.random() < 0.5

        def between(row: dict[str, Any]) -> Truth:
            found = _all([_compared(leaf.of(row), ">=", key), _compared(leaf.of(row), "<=", high)])
            return _not(found) if negated else found

        return f"{name} {'not ' * negated}between {text} and {other}", between
    operator = random.choice(["<", "<=", ">", ">=", "=", "!=", "<>", "=="])
    decide: Decide = lambda row: _compared(leaf.of(row), operator, key)  # noqa: E731 - one expression
    mirrored = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(operator, operator)
    return (f"{text} {mirrored} {name}" if random.random() < 0.2 else f"{name} {operator} {text}"), decide


def _equal(value: Any, key: Any) -> bool:
    return bool(value == key)


def _compared(value: Any, operator: str, key: Any) -> Truth:
    if value is None:
        return None
    if operator in ("=", "=="):
        return _equal(value, key)
    if operator in ("!=", "<>"):
        return not _equal(value, key)
    if isinstance(value, float) and isnan(value):
        return None
    return bool({"<": value < key, "<=": value <= key, ">": value > key, ">=": value >= key}[operator])


def literal_of(random: Random, kind: ice.IcebergType, values: Sequence[Any]) -> tuple[str, Any]:
    """A literal, mostly one of `values`, that may be compared with a type, and the value that it has there."""
    value = random.choice(values)
    if isinstance(kind, ice.IntegerType | ice.LongType | ice.DecimalType | ice.FloatType | ice.DoubleType):
        return _number(random, kind, value)
    if isinstance(kind, ice.BooleanType):
        text = str(value).lower()
        return random.choice([text, text.upper(), f"'{text}'"]), value
    if isinstance(kind, ice.StringType):
        return "'" + value.replace("'", "''") + "'", value
    if isinstance(kind, ice.BinaryType | ice.FixedType):
        return random.choice([(f"X'{value.hex()}'", value), ("'ab'", b"ab"), ("'ä'", "ä".encode())])
    if isinstance(kind, ice.UUIDType):
        return f"'{uuid.UUID(bytes=value)}'", value
    return _time(random, kind, value)


def _number(random: Random, kind: ice.IcebergType, value: Any) -> tuple[str, Any]:
    real = isinstance(kind, ice.FloatType | ice.DoubleType)
    if real and isnan(value):
        value = 0.0
    if real and value in (inf, -inf):
        return f"'{value}'", value
    exact = Decimal(value)
    other = random.choice(
        ["0", "-0.0", "1.5", "0.1", "-1e400", "1e39", "3000000000", "1e19", "2.50", ".5", "-7.", "1E2", "0.005"]
    )
    text = random.choice(
        [f"{exact:f}", str(exact), f"'{exact}'", str(exact) if not real else repr(value), other, other]
    )
    number = Fraction(Decimal(text.strip("'")))
    if not real:
        return text, number
    try:
        return text, float32(float(number)) if isinstance(kind, ice.FloatType) else float(number)
    except OverflowError:  # it is nearer to infinity than to the greatest value
        return text, number


def _time(random: Random, kind: ice.IcebergType, value: int) -> tuple[str, Any]:
    if isinstance(kind, ice.TimeType):
        at = datetime(1970, 1, 1) + timedelta(microseconds=value)
        return random.choice([(f"'{at.time().isoformat()}'", value), ("time '12:00'", DAY_US // 2)])
    at = datetime(1970, 1, 1) + timedelta(microseconds=value * (DAY_US if isinstance(kind, ice.DateType) else 1))
    exact = Fraction((at - datetime(1970, 1, 1)) // timedelta(microseconds=1))
    text = at.isoformat(sep=random.choice("T "))
    choice = random.random()
    if choice < 0.3:
        text, exact = at.date().isoformat(), Fraction(exact // DAY_US * DAY_US)
    elif choice < 0.4 and len(text) == 19:
        text, exact = text + ".0000005", exact + Fraction(1, 2)
    elif choice < 0.6 and isinstance(kind, ice.TimestamptzType):
        text, exact = random.choice(
            [(text + "Z", exact), (text + "+02:00", exact - 7_200_000_000), (text + "-0030", exact + 1_800_000_000)]
        )
    word = random.choice(["", "", "timestamp "])
    return f"{word}'{text}'", exact / DAY_US if isinstance(kind, ice.DateType) else exact
