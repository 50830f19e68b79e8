"""Terminal display of a run of this process: a progress bar, and a line per event."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn

from dlac_pipeline.audit.wording import format_bytes, format_count, format_duration
from dlac_pipeline.cli.shared import bar_columns

if TYPE_CHECKING:
    from dlac_pipeline.supervise.supervisor import Outcome

_LINES = {
    "attempt": "attempt {attempt} {begins}",
    "checkpoint": "checkpoint [green]{checkpoint_id}[/] step {step}, {rows}, {bytes} in {duration}",
    "finished": "finished at step {step}",
    "group_died": "[yellow]group {group} died:[/] {cause}",
    "group_rejoined": "group {group} takes part again from step {step}",
    "interval": "[dim]a checkpoint every {interval} of training: {why}[/]",
    "preempted": "[yellow]preempted:[/] {message}",
    "straggler": "[yellow]straggler:[/] {message}",
    "stopped": "stopped after step {step}",
    "left": "the script ended at step {step_of}, after a checkpoint: start it again to resume",
    "submitted": "submitted as [green]{job}[/]",
    "job": "[dim]the job is {state}[/]",
    "warning": "[yellow]warning[/] {message}",
    "caught_up": "caught up after step {step}: the next start trains what is appended",
}
_FAILURE = "[red]failure[/] of attempt {attempt} at step {step}: {cause}\n[dim]{log}{excerpt}[/]"
_FAILURE_LINES = 12
"""Last lines of a traceback, or of the log of a rank that recorded none."""
_RECOVERED = "{down}[yellow]recovered[/] in {took} from {resumed_from}; {rows} replayed"
_ENDINGS = {"caught_up": "caught up", "left": "was left by its script, after a checkpoint,"}


class Interrupted(BaseException):
    """Ctrl-C in a `dlac` command. For a KeyboardInterrupt click prints a word, and ends with exit status 1."""


class TrainingDisplay(Progress):
    """Display of a supervisor's events. A context manager."""

    def __init__(self, console: Console, run: str) -> None:
        super().__init__(*bar_columns(TextColumn("loss {task.fields[loss]}")), console=console)
        self._task = self.add_task(f"{run}: starting", total=None, loss="-")
        self._run = run
        self.attempt = 0
        """The last attempt that an event named, or 0."""

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        kind = event["event"]
        if kind == "training":
            self.update(self._task, description=self._run, completed=event["step"], total=event["total_steps"])
        elif kind == "verifying":
            text = f"{self._run}: verifying the checkpoint of step {event['step']} (MB)"
            done_mb, total_mb = event["bytes"] // 10**6, max(1, event["of"] // 10**6)
            self.update(self._task, description=text, completed=done_mb, total=total_mb)
        elif kind == "step":
            loss = "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
            self.update(self._task, completed=event["step"], loss=loss)
        elif kind in _LINES:
            if "step" in event:
                self.update(self._task, completed=event["step"])
            self.attempt = max(self.attempt, event.get("attempt", 0))
            self._print(_LINES[kind], _format_event(event))
        elif kind == "failure":
            self.attempt = max(self.attempt, event.get("attempt", 0))
            self.update(self._task, completed=event["step"])
            lines = (event.get("traceback") or event.get("log_tail", "")).splitlines()[-_FAILURE_LINES:]
            self._print(_FAILURE, {"log": "", **event, "excerpt": "".join(f"\n{line}" for line in lines)})
        elif kind == "quarantine":
            what = "rows left out, to see whether they are to blame:" if event.get("tentative") else "quarantined:"
            self._print(f"[yellow]{what}[/] {{reason}}", event)
        elif kind == "recovered":
            down_s = event.get("down_s", 0.0)
            down = f"down {format_duration(down_s)} until an operator started it again, " if down_s else ""
            took = format_duration(event["total_s"] - down_s)
            memory = f"memory of step {event['resumed_step']:,}" if event.get("from_memory") else ""
            facts = {"down": down, "took": took, "resumed_from": memory or event.get("resumed_from") or "the start"}
            self._print(_RECOVERED, {**facts, "rows": format_count(event["rows_replayed"], "row")})

    def _print(self, line: str, event: dict[str, Any]) -> None:
        """Print a line of markup with an event's values in it, which are no markup."""
        values = {name: escape(value) if isinstance(value, str) else value for name, value in event.items()}
        self.console.print(line.format_map(values), highlight=False, emoji=False)


def describe_outcome(run: str, outcome: "Outcome", *, attempt: int) -> str:
    """Return the end of a run for people. `attempt` is the last one that was launched, or 0."""
    ending = _ENDINGS.get(outcome.ending, outcome.ending)
    if not attempt:
        return f"run {run!r} {ending} at step {outcome.step:,}"
    launched = f" ({format_count(outcome.attempts, 'attempt')} by this command)" if outcome.attempts > 1 else ""
    return f"run {run!r} {ending} at step {outcome.step:,} in attempt {attempt:,}{launched}"


def _format_event(event: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(event)
    if "total_steps" in event:
        found["step_of"] = f"{event['step']:,}" + (f" of {total:,}" if (total := event["total_steps"]) else "")
    if event["event"] == "attempt":
        found["begins"] = f"resumes after step {event['step']:,}" if event["step"] else "starts at step 0"
    if event["event"] == "checkpoint":
        found |= {"rows": format_count(event["rows"], "row"), "bytes": format_bytes(event["bytes"])}
        found["duration"] = format_duration(event["duration_s"])
    if event["event"] == "interval":
        found["interval"] = format_duration(event["interval_s"])
    return found
