"""Facts as text for people: never wider than the terminal, and complete on a narrow one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dlac_pipeline.audit.wording import (
    TableColumn,
    fold,
    format_age,
    format_ago,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    lay_out_facts,
    lay_out_table,
)

LONG = "team-nlp.llama-continual-pretraining-2026-11-23-with-a-very-long-name"
COLUMNS = (
    TableColumn(name="step", right=True),
    TableColumn(name="committed"),
    TableColumn(name="names"),
    TableColumn(name="checkpoint", long=True),
    TableColumn(name="store", long=True),
)
ROWS = [
    ("5", "10 min ago", "", f"{LONG}-000000005-a2809855", "s3://bucket/" + "deep/" * 30),
    ("12,345", "now", "", "r-000012345-a2809855", ""),
]


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


@pytest.mark.parametrize("width", [32, 40, 60, 80, 120, 200])
def test_tables_fit_every_width(width: int) -> None:
    """No line is wider than the terminal, every value is complete, and empty columns are left out."""
    lines = lay_out_table(COLUMNS, ROWS, width)
    assert max(map(len, lines)) <= width
    joined = "".join("".join(line.split()) for line in lines)
    assert all("".join(value.split()) in joined for row in ROWS for value in row)
    assert "names" not in joined


def test_wide_tables_have_row_lines() -> None:
    """Output to a pipe is neither folded nor cut: a header, and a line for each row."""
    lines = lay_out_table(COLUMNS, ROWS, 100_000)
    assert len(lines) == 3
    assert [line.split()[-1] for line in lines[1:]] == [ROWS[0][4], ROWS[1][3]]


def test_one_long_column_is_folded() -> None:
    """A single long column is folded in its place if there is room. Rows without values have no line."""
    columns = (TableColumn(name="run", long=True), TableColumn(name="state"))
    lines = lay_out_table(columns, [(LONG, "dead"), ("r", "finished")], 60)
    assert lines[0].split() == ["run", "state"]
    assert lines[1].split()[-1] == "dead"
    assert lines[-1].split() == ["r", "finished"]
    assert lay_out_table(columns, [], 60) == []


def test_facts_leave_unknown_out() -> None:
    """An unknown fact has no line. Line breaks and long words stay within the width."""
    lines = lay_out_facts({"run": LONG, "loss": None, "names": "", "excluded": "a < 1\nb > 2", "step": 0}, 40)
    assert max(map(len, lines)) <= 40
    assert not any("None" in line or "loss" in line or "names" in line for line in lines)
    assert [line.split() for line in lines[-3:]] == [["excluded", "a", "<", "1"], ["b", ">", "2"], ["step", "0"]]
    assert lay_out_facts({}, 40) == []


def test_wide_characters_count_twice() -> None:
    """A wide character has two columns in a terminal."""
    assert fold("訓練" * 5, 8) == ["訓練訓練", "訓練訓練", "訓練"]
    assert fold("", 8) == [""]
