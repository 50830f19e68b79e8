"""Facts and tables in a terminal: never wider than it is, and complete in a narrow one."""

from __future__ import annotations

import io

import pytest

from dlac_pipeline.cli import shared

LONG = "team-nlp.llama-continual-pretraining-2026-11-23-with-a-very-long-name"
NAMES = ("step", "committed", "tags", "checkpoint", "store")
ROWS = [
    ("5", "10 min ago", "", f"{LONG}-000000005-a2809855", "s3://bucket/" + "deep/" * 30),
    ("12,345", "now", "", "r-000012345-a2809855", ""),
]


class Screen:
    """The output in a terminal of some width."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
        self._file = io.StringIO()
        monkeypatch.setattr(shared, "OUT", shared.SafeConsole(file=self._file, width=width))

    def lines(self) -> list[str]:
        """Return the lines shown, without blanks at their ends."""
        return [line.rstrip() for line in self._file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [32, 40, 60, 80, 120, 200, 400])
def test_tables_fit_every_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider than the terminal, every value is complete, and empty columns are left out."""
    screen = Screen(monkeypatch, width)
    shared.show_table(NAMES, ROWS, right=("step",), empty="none")
    assert max(map(len, screen.lines())) <= width
    joined = "".join("".join(line.split()) for line in screen.lines())
    assert all("".join(value.split()) in joined for row in ROWS for value in row)
    assert "tags" not in joined


def test_wide_tables_have_row_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output to a pipe is neither folded nor cut: a header, and a line for each row."""
    screen = Screen(monkeypatch, shared.WIDE)
    shared.show_table(NAMES, ROWS, right=("step",), empty="none")
    lines = screen.lines()
    assert len(lines) == 3
    assert [line.split()[-1] for line in lines[1:]] == [ROWS[0][4], ROWS[1][3]]
    assert lines[1].index("5") == lines[2].index("12,345") + 5


def test_wide_rows_become_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is wider than the terminal is shown as a block for each row. Without rows a sentence is shown."""
    screen = Screen(monkeypatch, 60)
    shared.show_table(("run", "state"), [(LONG, "dead"), ("r", "finished")], empty="none")
    shared.show_table(("run", "state"), [], empty="no run yet")
    lines = [line.split() for line in screen.lines()]
    assert lines == [
        ["run"],
        [LONG[:60]],
        [LONG[60:]],
        ["state", "dead"],
        [],
        ["run", "r"],
        ["state", "finished"],
        [],
        ["no", "run", "yet"],
    ]


def test_facts_leave_unknown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown fact has no line. Line breaks and long words stay within the width."""
    screen = Screen(monkeypatch, 40)
    facts = {"run": LONG, "loss": None, "names": "", "excluded_rows": "a < 1\nb > 2", "step": 0}
    shared.show_facts(facts, as_json=False)
    lines = screen.lines()
    assert max(map(len, lines)) <= 40
    assert not any("None" in line or "loss" in line or "names" in line for line in lines)
    assert [line.split() for line in lines[-3:]] == [
        ["excluded", "rows", "a", "<", "1"],
        ["b", ">", "2"],
        ["step", "0"],
    ]


def test_wide_characters_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide character has two columns in a terminal."""
    screen = Screen(monkeypatch, 11)
    shared.show_facts({"x": "訓練" * 5}, as_json=False)
    assert [line.split()[-1] for line in screen.lines()] == ["訓練訓練", "訓練訓練", "訓練"]
