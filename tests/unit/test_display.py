from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dlac_pipeline.cli.display import TrainingDisplay


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
        (
            {"event": "interval", "step": 4, "interval_s": 31.25, "why": "[/a] 1 failure"},
            "a checkpoint every 31 s of training: [/a] 1 failure\n",
        ),
        (
            {"event": "preempted", "step": 4, "message": "asked to exit (SIGTERM), within 5 s"},
            "preempted: asked to exit (SIGTERM), within 5 s\n",
        ),
        ({"event": "warning", "message": "[/a] :x: [bold]"}, "warning [/a] :x: [bold]\n"),
        (
            {"event": "recovered", "total_s": 1.25, "resumed_from": "[/a]", "rows_replayed": 3},
            "recovered in 1.2 s from [/a]; 3 rows replayed\n",
        ),
        (
            {"event": "recovered", "total_s": 1.25, "resumed_from": None, "rows_replayed": 1},
            "recovered in 1.2 s from the start; 1 row replayed\n",
        ),
        (
            {"event": "recovered", "total_s": 1.25, "resumed_step": 53, "from_memory": True, "rows_replayed": 1},
            "recovered in 1.2 s from memory of step 53; 1 row replayed\n",
        ),
        (
            {"event": "recovered", "total_s": 240.0, "down_s": 231.0, "resumed_from": "c", "rows_replayed": 0},
            "down 3 min 51 s until an operator started it again, recovered in 9 s from c; 0 rows replayed\n",
        ),
        (
            {
                "event": "checkpoint",
                "checkpoint_id": "c",
                "step": 10,
                "rows": 1,
                "bytes": 19_314,
                "duration_s": 0.42,
            },
            "checkpoint c step 10, 1 row, 19.3 kB in 0.4 s\n",
        ),
        ({"event": "attempt", "attempt": 5, "step": 1_234}, "attempt 5 resumes after step 1,234\n"),
        ({"event": "attempt", "attempt": 1, "step": 0}, "attempt 1 starts at step 0\n"),
        (
            {"event": "left", "step": 7, "total_steps": None},
            "the script ended at step 7, after a checkpoint: start it again to resume\n",
        ),
    ],
)
def test_markup_is_shown_literally(event: dict[str, Any], expected: str) -> None:
    """Causes, paths and messages are printed literally, and the run's name in the bar too."""
    printed = text_of(event)
    assert expected in printed
    assert "r[/a]: starting" in printed


def test_verification_has_bar() -> None:
    """The bar shows how much of a large checkpoint is verified."""
    assert "verifying the checkpoint of step 40 (MB) " in text_of(
        {"event": "verifying", "step": 40, "bytes": 3 * 10**9, "of": 12 * 10**9}
    )
    assert "3000/12000" in text_of({"event": "verifying", "step": 40, "bytes": 3 * 10**9, "of": 12 * 10**9})


def test_failure_shows_traceback() -> None:
    """The last lines of the traceback are shown. Without an exception, the last lines of the log are shown, if any."""
    event = {"event": "failure", "attempt": 1, "step": 4, "cause": "rank 0 died"}
    trace = "\n".join(["Traceback (most recent call last):", *map(str, range(20)), "ValueError: [/b]"])
    assert "rank 0 died\n/log\n9\n" in text_of({**event, "log": "/log", "log_tail": "noise", "traceback": trace})
    assert "ValueError: [/b]" in text_of({**event, "log": "/log", "log_tail": "noise", "traceback": trace})
    assert "rank 0 died\n/log\nnoise\n" in text_of({**event, "log": "/log", "log_tail": "noise", "traceback": ""})
    assert "rank 0 died" in text_of(event)
