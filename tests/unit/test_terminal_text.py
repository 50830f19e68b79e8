"""Text from outside is printed, and its terminal codes have no effect."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from dlac_pipeline.cli import main, shared
from dlac_pipeline.cli.shared import show_facts, show_rows, terminal_text

HOSTILE = [
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\link",
    "\x9b31m",
    "\x90q\x9c",
    "a\rb",
    "\x08\x08",
    "\x00",
    "\x7f",
    "\u202etxt.exe",
    "\u2066a\u2069",
    "\u200f",
    "\ufeff",
    "\u2028",
    "\ud800",
    "\U000e0001",
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


@pytest.mark.parametrize("text", ["plain", "é ü 漢字 नमस्ते", "a\nb\tc", "👩\u200d💻", "[/b] C:\\x"])
def test_written_text_stays(text: str) -> None:
    """Letters of any script, line breaks and joiners stay."""
    assert terminal_text(text) == text


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


def test_terminal_keeps_colours() -> None:
    """Codes of the console itself take effect."""
    out = io.StringIO()
    console = shared.SafeConsole(file=out, force_terminal=True, color_system="standard")
    console.print(Text("error", "red"), Text("\x1b[2J"))
    assert "\x1b[31merror" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


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
