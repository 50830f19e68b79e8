"""Conditions on the columns of a table: decided by facts where they suffice, row by row where they do not.

Conditions have no NOT: it is resolved when they are bound, so that a condition that is not true for a row needs no third value.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_, or_
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import NestedField

from dlac_pipeline.lakehouse.filters.facts import UNKNOWN, Facts
from dlac_pipeline.lakehouse.filters.literals import FLOATS, LiteralPlace, to_python

Known = Mapping[int, Facts]
"""Facts by the field id of a column, or of a field inside a struct."""
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FieldPath:
    """A column, or a field inside structs: the fields from the top level of the table down to it."""

    fields: tuple[NestedField, ...]

    @property
    def field_id(self) -> int:
        """The field id of the innermost field."""
        return self.fields[-1].field_id

    @property
    def name(self) -> str:
        """The name with dots, for people."""
        return ".".join(each.name for each in self.fields)

    @property
    def kind(self) -> Any:
        """The type of the innermost field."""
        return self.fields[-1].field_type

    def values(self, table: pa.Table) -> Any:
        """Return the values, null where a struct around them is."""
        found = table[self.fields[0].name]
        for parent, child in zip(self.fields, self.fields[1:], strict=False):
            struct: Any = parent.field_type
            found = pc.struct_field(found, [[each.field_id for each in struct.fields].index(child.field_id)])
        if pa.types.is_boolean(found.type):
            return found.cast(pa.int8())
        return found.cast(pa.binary()) if pa.types.is_fixed_size_binary(found.type) else found


class Condition(ABC):
    """A condition on the rows of a table."""

    @abstractmethod
    def may_be_true(self, known: Known) -> bool:
        """Return True if the condition may be true for some row."""

    @abstractmethod
    def must_be_true(self, known: Known) -> bool:
        """Return True if the condition is true for every row."""

    @abstractmethod
    def true_rows(self, table: pa.Table) -> _Flags:
        """Return the rows for which it is true. `table` has the top-level columns of `paths`."""

    @property
    @abstractmethod
    def paths(self) -> tuple[FieldPath, ...]:
        """The columns that it looks at."""

    def simplify(self, known: Known) -> "Condition":
        """Return the part of the condition that the facts leave open."""
        if not self.may_be_true(known):
            return NEVER
        return ALWAYS if self.must_be_true(known) else self

    @property
    def columns(self) -> list[str]:
        """The names of the top-level columns that it looks at."""
        return sorted({path.fields[0].name for path in self.paths})


@dataclass(frozen=True)
class Constant(Condition):
    """A condition that is true for all rows, or for none."""

    value: bool

    def may_be_true(self, known: Known) -> bool:
        """Return the constant."""
        return self.value

    def must_be_true(self, known: Known) -> bool:
        """Return the constant."""
        return self.value

    def true_rows(self, table: pa.Table) -> _Flags:
        """Return the constant for every row."""
        return np.full(len(table), self.value)

    @property
    def paths(self) -> tuple[FieldPath, ...]:
        """No columns."""
        return ()


ALWAYS = Constant(True)
NEVER = Constant(False)


@dataclass(frozen=True)
class Combination(Condition):
    """AND (`every`) or OR of conditions."""

    every: bool
    parts: tuple[Condition, ...]

    def may_be_true(self, known: Known) -> bool:
        """Return True if all parts (AND) or any part (OR) may be true."""
        return (all if self.every else any)(part.may_be_true(known) for part in self.parts)

    def must_be_true(self, known: Known) -> bool:
        """Return True if all parts (AND) or any part (OR) must be true."""
        return (all if self.every else any)(part.must_be_true(known) for part in self.parts)

    def true_rows(self, table: pa.Table) -> _Flags:
        """Return the rows for which all parts (AND) or any part (OR) is true."""
        return reduce(and_ if self.every else or_, (part.true_rows(table) for part in self.parts))

    @cached_property
    def paths(self) -> tuple[FieldPath, ...]:
        """The columns of all parts."""
        return tuple({path.field_id: path for part in self.parts for path in part.paths}.values())

    def simplify(self, known: Known) -> Condition:
        """Return the parts that the facts leave open."""
        return combine(self.every, [part.simplify(known) for part in self.parts])


def combine(every: bool, parts: Sequence[Condition]) -> Condition:
    """Return the AND (`every`) or OR of conditions without the constants among them."""
    deciding, neutral = (NEVER, ALWAYS) if every else (ALWAYS, NEVER)
    if deciding in parts:
        return deciding
    left = tuple(part for part in parts if part != neutral)
    return Combination(every, left) if len(left) > 1 else left[0] if left else neutral


@dataclass(frozen=True)
class _OnOne(Condition):
    path: FieldPath

    @property
    def paths(self) -> tuple[FieldPath, ...]:
        return (self.path,)

    def may_be_true(self, known: Known) -> bool:
        return self._may_be_true(known.get(self.path.field_id, UNKNOWN))

    def must_be_true(self, known: Known) -> bool:
        return self._must_be_true(known.get(self.path.field_id, UNKNOWN))

    def true_rows(self, table: pa.Table) -> _Flags:
        return self._true_rows(self.path.values(table))

    @abstractmethod
    def _may_be_true(self, facts: Facts) -> bool:
        """Return True if the facts leave room for a value for which the condition is true."""

    @abstractmethod
    def _must_be_true(self, facts: Facts) -> bool:
        """Return True if the facts prove the condition of every row."""

    @abstractmethod
    def _true_rows(self, values: Any) -> _Flags:
        """Return the rows for whose values it is true."""

    @cached_property
    def _has_nan(self) -> bool:
        return isinstance(self.path.kind, FLOATS)

    def _may_be_nan(self, facts: Facts) -> bool:
        return self._has_nan and facts.may_be_nan

    def _scalar(self, value: Any, values: Any) -> Any:
        return pa.scalar(self._python(value), type=values.type)

    def _python(self, value: Any) -> Any:
        return int(value) if isinstance(value, bool) else to_python(self.path.kind, value)


@dataclass(frozen=True)
class _Negatable(_OnOne):
    negated: bool = False

    def _must_be_true(self, facts: Facts) -> bool:
        """Return True if all rows have values, and the opposite may be true for no value."""
        return not facts.may_be_null and not replace(self, negated=not self.negated)._may_be_true(facts)


@dataclass(frozen=True)
class IsNull(_Negatable):
    """`column is null`, or with `negated` its opposite."""

    def _may_be_true(self, facts: Facts) -> bool:
        return facts.may_have_value if self.negated else facts.may_be_null

    def _must_be_true(self, facts: Facts) -> bool:
        return not (facts.may_be_null if self.negated else facts.may_have_value)

    def _true_rows(self, values: Any) -> _Flags:
        return _flags(pc.is_valid(values) if self.negated else pc.is_null(values))


@dataclass(frozen=True)
class IsNan(_Negatable):
    """`column is nan`, or with `negated` its opposite: null is neither."""

    def _may_be_true(self, facts: Facts) -> bool:
        return facts.may_have_value and (self.negated or self._may_be_nan(facts))

    def _true_rows(self, values: Any) -> _Flags:
        if not self._has_nan:
            return _flags(pc.is_valid(values)) if self.negated else np.zeros(len(values), dtype=np.bool_)
        nan = pc.is_nan(values)
        return _flags(pc.invert(nan) if self.negated else nan)


@dataclass(frozen=True)
class IsBetween(_OnOne):
    """A column's value is at least `low` and at most `high`, or above and below where `open`. None is no limit."""

    low: Any = None
    high: Any = None
    open: bool = False

    def _may_be_true(self, facts: Facts) -> bool:
        above = self.high is None or facts.lower is None or self._is_below(facts.lower, self.high)
        below = self.low is None or facts.upper is None or self._is_below(self.low, facts.upper)
        return facts.may_have_value and above and below

    def _must_be_true(self, facts: Facts) -> bool:
        above = self.low is None or (facts.lower is not None and self._is_below(self.low, facts.lower))
        below = self.high is None or (facts.upper is not None and self._is_below(facts.upper, self.high))
        return not facts.may_be_null and not self._may_be_nan(facts) and above and below

    def _true_rows(self, values: Any) -> _Flags:
        found = np.ones(len(values), dtype=np.bool_)
        if self.low is not None:
            found &= _flags((pc.greater if self.open else pc.greater_equal)(values, self._scalar(self.low, values)))
        if self.high is not None:
            found &= _flags((pc.less if self.open else pc.less_equal)(values, self._scalar(self.high, values)))
        return found

    def _is_below(self, one: Any, other: Any) -> bool:
        return bool(one < other if self.open else one <= other)


@dataclass(frozen=True)
class IsAmong(_Negatable):
    """A column's value is one of `members`, or with `negated` is a value and none of them."""

    members: frozenset[Any] = frozenset()

    def _may_be_true(self, facts: Facts) -> bool:
        if self.negated:
            return facts.may_have_value and not self._is_only_member(facts)
        return any(facts.may_hold(value) for value in self.members)

    def _true_rows(self, values: Any) -> _Flags:
        if self._has_nan:  # a hash would tell -0.0 from 0.0
            equal = (_flags(pc.equal(values, self._scalar(member, values))) for member in self.members)
            found = reduce(or_, equal)
        else:
            members = pa.array([self._python(member) for member in self.members], type=values.type)
            found = _flags(pc.is_in(values, value_set=members))
        return _flags(pc.is_valid(values)) & ~found if self.negated else found

    def _is_only_member(self, facts: Facts) -> bool:
        """Return True if all values are one and the same member. Nulls are ignored."""
        one = facts.lower is not None and facts.lower == facts.upper
        return one and facts.lower in self.members and not self._may_be_nan(facts)


@dataclass(frozen=True)
class IsLike(_Negatable):
    """A text matches a LIKE pattern: it starts with `prefix`, and the pattern `rest` follows, or any text if that is None."""

    prefix: str = ""
    rest: str | None = None

    def _may_be_true(self, facts: Facts) -> bool:
        settled = self._all_start(facts) and self.rest is None if self.negated else self._none_starts(facts)
        return facts.may_have_value and not settled

    def _true_rows(self, values: Any) -> _Flags:
        if self.rest is None:
            found = pc.starts_with(values, self.prefix)
        else:
            found = pc.match_substring_regex(values, rf"(?s)\A{_escaped(self.prefix)}{self.rest}\z")
        return _flags(pc.invert(found) if self.negated else found)

    def _all_start(self, facts: Facts) -> bool:
        bounds = (facts.lower, facts.upper)
        return all(bound is not None and bound.startswith(self.prefix) for bound in bounds)

    def _none_starts(self, facts: Facts) -> bool:
        below = facts.upper is not None and facts.upper < self.prefix
        return below or (facts.lower is not None and facts.lower[: len(self.prefix)] > self.prefix)


def compare(path: FieldPath, operator: str, place: LiteralPlace) -> Condition:
    """Return the condition that a column's value is before or after a literal: `operator` is <, <=, > or >=."""
    low, high = (place.at_least, None) if operator in (">", ">=") else (None, place.at_most)
    if low is None and high is None:
        return NEVER
    return IsBetween(path, low, high, operator in ("<", ">") and place.equal is not None)


def match_members(path: FieldPath, places: Sequence[LiteralPlace], negated: bool) -> Condition:
    """Return the condition that a column's value is one of some literals, or none of them."""
    members = frozenset(place.equal for place in places if place.equal is not None)
    if not members:
        return IsNull(path, negated=True) if negated else NEVER
    return IsAmong(path, negated, members)


def match_pattern(path: FieldPath, pattern: str, negated: bool) -> Condition:
    """Return the condition that a text matches a LIKE pattern, or does not."""
    prefix, rest = _split_pattern(pattern)
    if rest == "":
        return match_members(path, [LiteralPlace(prefix, prefix, prefix)], negated)
    return IsLike(path, negated, prefix, rest)


def _split_pattern(pattern: str) -> tuple[str, str | None]:
    r"""Return the literal start of a LIKE pattern, and the rest as a regular expression, or None if anything may follow.

    `%` stands for any text and `_` for one character. `\%`, `\_` and `\\` stand for themselves.
    """
    tokens: list[tuple[bool, str]] = []
    for escaped, plain in re.findall(r"\\([%_\\])|(.)", pattern, re.DOTALL):
        tokens.append((plain in ("%", "_") and not escaped, escaped or plain))
    end = next((place for place, (wild, _) in enumerate(tokens) if wild), len(tokens))
    prefix = "".join(character for _, character in tokens[:end])
    if [character for _, character in tokens[end:]] == ["%"]:
        return prefix, None
    wilds = {"%": ".*", "_": "."}
    return prefix, "".join(wilds[text] if wild else _escaped(text) for wild, text in tokens[end:])


def _escaped(text: str) -> str:
    """The text as a regular expression of RE2 that matches it alone."""
    return "".join(each if each.isalnum() else rf"\x{{{ord(each):x}}}" for each in text)


def _flags(found: Any) -> _Flags:
    flags: _Flags = pc.fill_null(found, False).to_numpy().astype(np.bool_)
    return flags
