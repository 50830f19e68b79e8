"""What a person sees in the terminal of a run that trains: of one's own a progress bar, and a line per checkpoint, failure,
recovery; of any other, facts that are looked up each second.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from catalog.connect import Lakehouse


def watch_run(lakehouse: Lakehouse, run: str, console: Console, *, every_s: float, as_json: bool) -> None:
    """Show where a run is, again and again, until it has ended or Ctrl-C: as a table, or as lines of JSON for programs.

    Raises:
        NoSuchRun: the ledger has no row of it.
    """
    from dlac_pipeline.recover.live_status import LiveStatus

    status = LiveStatus(lakehouse, run)
    with suppress(KeyboardInterrupt):
        if as_json or not console.is_terminal:
            while True:
                console.file.write(json.dumps(status.look(), default=str) + "\n")
                console.file.flush()
                if status.finished:
                    return
                time.sleep(every_s)
        with Live(_table(status.look()), console=console, auto_refresh=False) as live:
            while not status.finished:
                time.sleep(every_s)
                live.update(_table(status.look()), refresh=True)


def _table(facts: dict[str, Any]) -> Table:
    """Facts for people: times in hours and minutes, shares in percent."""
    table = Table(show_header=False)
    for name, value in facts.items():
        if value is not None:
            table.add_row(name.removesuffix("_s").replace("_", " "), Text(_said(name, value)))
    return table


def _said(name: str, value: Any) -> str:
    if name.endswith("_per_s"):
        return f"{value:,.0f}/s"
    if name.endswith("_s"):
        return str(timedelta(seconds=round(value)))
    if name == "consumed_share":
        return f"{value:.1%} of the pass"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class TrainingDisplay:
    """Shows a supervisor's events; a context manager."""

    def __init__(self, console: Console, run: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(f"{run}: starting", total=None, loss="-")
        self._run = run

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        kind = event["event"]
        if kind == "training":
            self._progress.update(
                self._task, description=self._run, completed=event["step"], total=event["total_steps"]
            )
        elif kind == "verifying":
            self._progress.update(
                self._task,
                description=f"{self._run}: verifying the checkpoint of step {event['step']} (MB)",
                completed=event["bytes"] // 10**6,
                total=max(1, event["of"] // 10**6),
            )
        elif kind == "step":
            self._progress.update(self._task, completed=event["step"], loss=f"{event['loss']:.4f}")
        elif kind in _LINES:
            self._progress.update(self._task, completed=event["step"])
            self._print(_LINES[kind], event)
        elif kind == "submitted":
            self._print("submitted as [green]{job}[/]", event)
        elif kind == "job":
            self._print("[dim]the job is {state}[/]", event)
        elif kind == "warning":
            self._print("[yellow]warning[/] {message}", event)
        elif kind == "quarantine":
            self._print("[yellow]quarantined:[/] {reason}", event)
        elif kind == "recovered":
            self._print(_RECOVERED, {**event, "resumed_from": event["resumed_from"] or "the start"})

    def _print(self, line: str, event: dict[str, Any]) -> None:
        """Print a line of markup with an event's values in it, which are no markup."""
        values = {name: escape(value) if isinstance(value, str) else value for name, value in event.items()}
        self._progress.console.print(line.format_map(values), highlight=False, emoji=False)


_LINES = {
    "attempt": "attempt {attempt} starts behind step {step}",
    "checkpoint": "checkpoint [green]{checkpoint_id}[/] step {step}, {rows} rows, {bytes} bytes in {duration_s:.2f} s",
    "failure": "[red]failure[/] of attempt {attempt} at step {step}: {cause}\n[dim]{log}[/]",
    "finished": "finished at step {step}",
    "interval": "[dim]a checkpoint every {interval_s:.1f} s of training: {why}[/]",
    "preempted": "[yellow]preempted:[/] {message}",
    "straggler": "[yellow]straggler:[/] {message}",
    "stopped": "stopped behind step {step}",
    "left": "the script ended at step {step} of {total_steps}, behind a checkpoint; start it again to go on",
    "caught_up": "caught up behind step {step}; goes on with what is appended",
}
_RECOVERED = "[yellow]recovered[/] in {total_s:.1f} s from {resumed_from}; {rows_replayed} rows replayed"
