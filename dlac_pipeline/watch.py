"""What a person sees in the terminal while a run trains: a progress bar, and a line per checkpoint, failure, recovery."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingDisplay:
    """Shows a supervisor's events; a context manager."""

    def __init__(self, console: Console, run: str) -> None:
        columns = (
            TextColumn("{task.description}"),
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
            self._progress.console.print(_LINES[kind].format_map(event), highlight=False)
        elif kind == "warning":
            self._progress.console.print(f"[yellow]warning[/] {event['message']}", highlight=False)
        elif kind == "recovered":
            self._progress.console.print(
                f"[yellow]recovered[/] in {event['total_s']:.1f} s from {event['resumed_from'] or 'the start'}; "
                f"{event['rows_replayed']} rows replayed"
            )


_LINES = {
    "attempt": "attempt {attempt} starts behind step {step}",
    "checkpoint": "checkpoint [green]{checkpoint_id}[/] step {step}, {rows} rows, {bytes} bytes in {duration_s:.2f} s",
    "failure": "[red]failure[/] of attempt {attempt} at step {step}: {cause}\n[dim]{log}[/]",
    "finished": "finished at step {step}",
    "stopped": "stopped behind step {step}",
}
