"""What a person sees in the terminal while a run trains: a progress bar, and a line per checkpoint, failure, recovery."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
        elif kind == "step":
            self._progress.update(self._task, completed=event["step"], loss=f"{event['loss']:.4f}")
        elif kind in _LINES:
            self._progress.update(self._task, completed=event["step"])
            self._print(_LINES[kind], event)
        elif kind == "warning":
            self._print("[yellow]warning[/] {message}", event)
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
    "stopped": "stopped behind step {step}",
    "caught_up": "caught up behind step {step}; goes on with what is appended",
}
_RECOVERED = "[yellow]recovered[/] in {total_s:.1f} s from {resumed_from}; {rows_replayed} rows replayed"
