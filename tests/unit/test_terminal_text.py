"""Text in a terminal: never wider than it is, complete in a narrow one, and without effect of codes from outside."""

import io
import sys
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlac_pipeline.audit.audit import AuditReport
from dlac_pipeline.audit.table import audit_table
from dlac_pipeline.cli import main, shared
from dlac_pipeline.cli.display import TrainingDisplay
from dlac_pipeline.cli.shared import show_facts, terminal_text
from dlac_pipeline.extensions.auditors.commands import show_rows

HOSTILE = [
    *("\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\link", "\x9b31m", "\x90q\x9c", "a\rb", "\x08\x08"),
    *("\x00", "\x7f", "\u202etxt.exe", "\u2066a\u2069", "\u200f", "\ufeff", "\u2028", "\ud800", "\U000e0001"),
]


def is_safe(text: str) -> bool:
    """Return whether a terminal only prints the text."""
    return terminal_text(text) == text and text.encode(errors="replace") is not None


@given(st.text(st.characters()))
def test_only_text_remains(text: str) -> None:
    """This holds for any text. A second pass changes nothing."""
    shown = terminal_text(text)
    assert terminal_text(shown) == shown
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in shown if each not in "\n\t")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_tables_obey_nothing(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes in names and values have no effect in narrow and wide tables and in plain lines."""
    out = io.StringIO()
    console = shared.SafeConsole(file=out, width=60)
    monkeypatch.setattr(shared, "OUT", console)
    show_rows([hostile, "b"], [[hostile, 1], [None, hostile * 30]])
    show_rows([hostile, "b"], [[hostile, "wide" * 30]])
    show_facts({"run": hostile, hostile: 1}, as_json=False)
    console.print(hostile, markup=False)
    console.print(Text(hostile))
    table = Table(hostile)
    table.add_row(hostile)
    console.print(table)
    assert is_safe(out.getvalue())
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("hostile", HOSTILE[:-1])
def test_errors_obey_nothing(hostile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error quotes the value found, and its codes have no effect."""
    output: Any = io.StringIO()
    monkeypatch.setattr(main, "ERR", shared.SafeConsole(file=output))
    with pytest.raises(SystemExit):
        main.end_with_message(f"SpecInvalid: found {hostile}", 64)
    assert is_safe(output.getvalue())
    assert capsys.readouterr().out == ""
    assert sys.stdout is not None


LONG = "team-nlp.llama-continual-pretraining-2026-11-23-with-a-very-long-name"
NAMES = ("step", "committed", "tags", "checkpoint", "store")
ROWS = [
    ("5", "10 min ago", "", f"{LONG}-000000005-a2809855", "s3://bucket/" + "deep/" * 30),
    ("12,345", "now", "", "r-000012345-a2809855", ""),
]


@pytest.mark.parametrize("width", [32, 60, 120, 400])
def test_tables_fit_every_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider than the terminal, every value is complete, and empty columns are left out."""
    out = io.StringIO()
    monkeypatch.setattr(shared, "OUT", shared.SafeConsole(file=out, width=width))
    shared.show_table(NAMES, ROWS, right=("step",), empty="none")
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= width
    joined = "".join(out.getvalue().split())
    assert all("".join(value.split()) in joined for row in ROWS for value in row)
    assert "tags" not in joined


def text_of(event: dict[str, Any]) -> str:
    """Return the display's text for one event, without styles."""
    console = Console(file=io.StringIO(), width=200)
    with TrainingDisplay(console, "r[/a]") as display:
        display.show(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            {"event": "failure", "attempt": 1, "step": 4, "cause": "KeyError: '[/a]'", "log": "/logs/[red]\\"},
            "failure of attempt 1 at step 4: KeyError: '[/a]'\n/logs/[red]\\\n",
        ),
        ({"event": "warning", "message": "[/a] :x: [bold]"}, "warning [/a] :x: [bold]\n"),
        (
            {"event": "recovered", "total_s": 240.0, "down_s": 231.0, "resumed_from": "[/c]", "rows_replayed": 0},
            "down 3 min 51 s until an operator started it again, recovered in 9 s from [/c]; 0 rows replayed\n",
        ),
    ],
)
def test_markup_is_shown_literally(event: dict[str, Any], expected: str) -> None:
    """Causes, paths and messages are printed literally, and the run's name in the bar too."""
    printed = text_of(event)
    assert expected in printed
    assert "r[/a]: starting" in printed


def test_empty_run_is_not_exact() -> None:
    """An audit of a run that has trained nothing proves nothing, and says so."""
    counts: dict[str, Any] = {field.name: 0 for field in fields(AuditReport) if field.default is MISSING}
    none: dict[str, Any] = {"head_checkpoint": None, "adopted_from": None, "forked_from": None, "problems": ()}
    report = AuditReport(**{**counts, **none, "run": "r", "finished": False})
    shown = []
    for each in (report, replace(report, head_checkpoint="r-1", checkpoints=1)):
        console = Console(file=io.StringIO(), width=100)
        console.print(audit_table(each))
        shown.append(console.file.getvalue())  # type: ignore[attr-defined]  # it is a StringIO
    assert ["nothing was trained" in each for each in shown] == [True, False]
