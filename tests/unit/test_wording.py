"""Durations, ages, counts and rates as text for people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dlac_pipeline.audit.wording import format_age, format_ago, format_bytes, format_count, format_duration, format_rate


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.004, "0 s"),
        (0.02, "0.02 s"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (45.4, "45 s"),
        (59.7, "1 min"),
        (231, "3 min 51 s"),
        (600, "10 min"),
        (3599.9, "1 h"),
        (7500, "2 h 5 min"),
        (86_399.9, "1 d"),
        (273_600, "3 d 4 h"),
        (-231, "-3 min 51 s"),
    ],
)
def test_durations_have_two_units(seconds: float, expected: str) -> None:
    """A duration has its two largest units, without a zero: no `0 h 10 min`, and no 60 s."""
    assert format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "now"), (-2, "now"), (9.9, "9 s ago"), (61, "1 min ago"), (7500, "2 h 5 min ago"), (-3600, "in 1 h")],
)
def test_ages_are_whole_units(seconds: float, expected: str) -> None:
    """An age in the future is shown as such. A moment is shown like its seconds."""
    assert format_ago(seconds) == expected
    moment = datetime(2026, 11, 23, tzinfo=UTC)
    assert format_age(moment, now=(moment + timedelta(seconds=seconds)).timestamp()) == expected
    assert format_age(None) == ""


def test_counts_have_right_number() -> None:
    """One is singular, every other number plural. Sizes and rates have their units."""
    assert [format_count(count, "attempt") for count in (0, 1, 5_000)] == ["0 attempts", "1 attempt", "5,000 attempts"]
    assert format_count(2, "leg of it", "legs of it") == "2 legs of it"
    assert [format_bytes(count) for count in (None, 1, 17_500)] == ["", "1 byte", "17.5 kB"]
    assert [format_rate(rate, "steps") for rate in (0.0, 0.423, 3.0, 1234.5)] == [
        "0 steps/s",
        "0.42 steps/s",
        "3 steps/s",
        "1,234 steps/s",
    ]
