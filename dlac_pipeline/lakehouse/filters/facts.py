"""Facts about a column's values in a file or a row group, and what partition values prove of their source columns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import numpy as np
from pyiceberg import transforms
from pyiceberg.manifest import PartitionFieldSummary
from pyiceberg.transforms import BucketTransform, IdentityTransform, TimeTransform, Transform, TruncateTransform
from pyiceberg.types import DecimalType, IcebergType, IntegerType
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string, truncate_upper_bound_text_string

from dlac_pipeline.lakehouse.filters import literals


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about a column's values. All values that are neither null nor NaN are between `lower` and `upper`.

    None is an unknown bound. `hashed` decides whether a value hashes to the bucket of its partition.
    """

    may_be_null: bool = True
    may_have_value: bool = True
    may_be_nan: bool = True
    lower: Any = None
    upper: Any = None
    hashed: Callable[[Any], bool] | None = None

    def may_hold(self, value: Any) -> bool:
        """Return True if a row may have this value."""
        inside = (self.lower is None or self.lower <= value) and (self.upper is None or value <= self.upper)
        return self.may_have_value and inside and (self.hashed is None or self.hashed(value))


UNKNOWN = Facts()
ALL_NULL = Facts(may_have_value=False, may_be_nan=False)
NO_NULL = Facts(may_be_null=False)


def both(one: Facts, other: Facts) -> Facts:
    """Return what follows from two facts together."""
    return Facts(
        may_be_null=one.may_be_null and other.may_be_null,
        may_have_value=one.may_have_value and other.may_have_value,
        may_be_nan=one.may_be_nan and other.may_be_nan,
        lower=_merge(max, one.lower, other.lower),
        upper=_merge(min, one.upper, other.upper),
        hashed=_merge(lambda mine, theirs: lambda value: mine(value) and theirs(value), one.hashed, other.hashed),
    )


def of_counts(
    kind: IcebergType, *, rows: int, nulls: int | None, nans: int | None = None, lower: Any = None, upper: Any = None
) -> Facts:
    """Return the facts from counts and comparable bounds. None is unknown. Columns other than floats have no NaN."""
    return Facts(
        may_be_null=nulls != 0,
        may_have_value=nulls is None or nulls < rows,
        may_be_nan=isinstance(kind, literals.FLOATS) and nans != 0,
        lower=lower,
        upper=upper,
    )


def of_partition(transform: Transform[Any, Any], kind: IcebergType, value: Any) -> Facts:
    """Return the facts that a file's partition value proves of its source column of type `kind`."""
    if not _is_known(transform):
        return UNKNOWN
    if value is None:
        return ALL_NULL
    value = literals.from_python(kind, value) if _keeps_type(transform) else value
    if isinstance(transform, BucketTransform):
        return replace(NO_NULL, may_be_nan=False, hashed=_in_bucket(transform, kind, value))
    if isinstance(value, float) and isnan(value):
        return NO_NULL
    lower, upper = _range(transform, kind, value, value)
    nan = isinstance(kind, literals.FLOATS) and not isinstance(transform, IdentityTransform)
    return Facts(may_be_null=False, may_be_nan=nan, lower=lower, upper=upper)


def of_summary(transform: Transform[Any, Any], kind: IcebergType, summary: PartitionFieldSummary) -> Facts:
    """Return the facts that a manifest's summary of one partition field proves of the field's source column."""
    if not _is_known(transform):
        return UNKNOWN
    found = replace(UNKNOWN if summary.contains_null else NO_NULL, may_be_nan=isinstance(kind, literals.FLOATS))
    if isinstance(transform, BucketTransform) or summary.lower_bound is None or summary.upper_bound is None:
        return found
    stored = kind if _keeps_type(transform) else IntegerType()
    least, greatest = literals.from_bytes(stored, summary.lower_bound), literals.from_bytes(stored, summary.upper_bound)
    if least is None or greatest is None:
        return found
    lower, upper = _range(transform, kind, least, greatest)
    return replace(found, lower=lower, upper=upper)


def _merge(pick: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    return one if other is None else other if one is None else pick(one, other)


def _is_known(transform: Transform[Any, Any]) -> bool:
    """Return True if the transform keeps null apart from values, and `_range` or `_in_bucket` can invert it."""
    return isinstance(transform, IdentityTransform | TruncateTransform | BucketTransform | TimeTransform)


def _keeps_type(transform: Transform[Any, Any]) -> bool:
    return isinstance(transform, IdentityTransform | TruncateTransform)


def _in_bucket(transform: BucketTransform[Any], kind: IcebergType, bucket: int) -> Callable[[Any], bool] | None:
    if literals.unit_ns(kind) == 1:
        return None  # engines disagree on the unit that is hashed
    bucket_of = transform.transform(kind)
    return lambda value: bucket_of(literals.to_python(kind, value)) == bucket


def _range(transform: Transform[Any, Any], kind: IcebergType, least: Any, greatest: Any) -> tuple[Any, Any]:
    """Return the bounds of the source values whose partition values are between two values. None where open."""
    if isinstance(transform, IdentityTransform):
        return least, greatest
    if isinstance(transform, TruncateTransform):
        return _truncated(transform.width, kind, least, greatest)
    if isinstance(transform, TimeTransform) and isinstance(least, int):
        return _in_time(transform, kind, least, greatest)
    return None, None


def _truncated(width: int, kind: IcebergType, least: Any, greatest: Any) -> tuple[Any, Any]:
    if isinstance(greatest, str | bytes):
        return least, _after_prefix(greatest)
    if isinstance(kind, literals.INTEGERS):
        low, high = literals.limits_of(kind)
        # Engines that overflow put the least values of the type among its greatest.
        return (None, None) if greatest > high - width else (None if least < low else least, greatest + width - 1)
    return (least, greatest + width - 1) if isinstance(kind, DecimalType) else (None, None)


def _after_prefix(prefix: Any) -> Any:
    """Return a value greater than all that start with `prefix`, or None."""
    if isinstance(prefix, bytes):
        return truncate_upper_bound_binary_string(prefix + b"\0", len(prefix))
    return truncate_upper_bound_text_string(prefix + "\0", len(prefix))


def _in_time(transform: Transform[Any, Any], kind: IcebergType, least: int, greatest: int) -> tuple[Any, Any]:
    """Before 1970 some engines rounded towards 1970: such a partition may hold times of the previous unit, too."""
    unit = literals.unit_ns(kind)
    if unit is None:
        return None, None
    first = least - 1 if least <= 0 else least
    return -(-_start_ns(transform, first) // unit), (_start_ns(transform, greatest + 1) - 1) // unit


def _start_ns(transform: Transform[Any, Any], value: int) -> int:
    """Nanoseconds from 1970 to the start of an hour, day, month or year that is counted from 1970."""
    if isinstance(transform, transforms.HourTransform):
        return value * literals.DAY_NS // 24
    if isinstance(transform, transforms.MonthTransform | transforms.YearTransform):
        months = value * 12 if isinstance(transform, transforms.YearTransform) else value
        return int(np.datetime64(months, "M").astype("datetime64[D]").astype(np.int64)) * literals.DAY_NS
    assert isinstance(transform, transforms.DayTransform)
    return value * literals.DAY_NS
