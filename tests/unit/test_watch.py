from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dlac_pipeline.watch import TrainingDisplay


def shown(event: dict[str, Any]) -> str:
    """What the display prints of one event, without styles."""
    console = Console(file=io.StringIO(), width=200)
    with TrainingDisplay(console, "r[/a]") as display:
        display.show(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            {"event": "failure", "attempt": 1, "step": 4, "cause": "KeyError: '[/a]'", "log": "/logs/[red]\\"},
            "failure of attempt 1 at step 4: KeyError: '[/a]'\n/logs/[red]\\\n",
        ),
        (
            {"event": "interval", "step": 4, "interval_s": 31.25, "why": "[/a] 1 failure"},
            "a checkpoint every 31.2 s of training: [/a] 1 failure\n",
        ),
        (
            {"event": "preempted", "step": 4, "message": "told to leave (SIGTERM), within 5 s"},
            "preempted: told to leave (SIGTERM), within 5 s\n",
        ),
        ({"event": "warning", "message": "[/a] :x: [bold]"}, "warning [/a] :x: [bold]\n"),
        (
            {"event": "recovered", "total_s": 1.25, "resumed_from": "[/a]", "rows_replayed": 3},
            "recovered in 1.2 s from [/a]; 3 rows replayed\n",
        ),
        (
            {"event": "recovered", "total_s": 1.25, "resumed_from": None, "rows_replayed": 3},
            "recovered in 1.2 s from the start; 3 rows replayed\n",
        ),
    ],
)
def test_what_looks_like_markup_is_shown_as_it_is(event: dict[str, Any], said: str) -> None:
    """Causes, paths and messages are printed letter by letter, and the run's name in the bar too."""
    printed = shown(event)
    assert said in printed
    assert "r[/a]: starting" in printed


def test_verifying_has_a_bar() -> None:
    """Whoever waits for a large checkpoint sees how far it is."""
    assert "verifying the checkpoint of step 40 (MB) " in shown(
        {"event": "verifying", "step": 40, "bytes": 3 * 10**9, "of": 12 * 10**9}
    )
    assert "3000/12000" in shown({"event": "verifying", "step": 40, "bytes": 3 * 10**9, "of": 12 * 10**9})
