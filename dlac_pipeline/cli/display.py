"""Terminal display: of a run of this process a progress bar and a line per event, of any other run the facts of each look."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress, TextColumn

from dlac_pipeline.audit.wording import format_ago, format_bytes, format_count, format_duration, format_rate
from dlac_pipeline.cli.shared import bar_columns, facts_table
from dlac_pipeline.lakehouse.plain_json import strict_json

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
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
_LOSSES = ("checkpointing", "startup", "down", "replayed", "abandoned", "unknown")
"""Causes of lost time: fields of the goodput without their `_s`."""
_LOSSES_SHOWN = 3
_ENDINGS = {"caught_up": "caught up", "left": "was left by its script, after a checkpoint,"}


class Interrupted(BaseException):
    """Ctrl-C in a `dlac` command. For a KeyboardInterrupt click prints a word, and ends with exit status 1."""


def watch_run(
    open_lakehouse: "Callable[[], Lakehouse]",
    run: str,
    console: Console,
    *,
    every_s: float,
    as_json: bool,
    options: Sequence[str] = (),
) -> None:
    """Show where a run is until it ends or Ctrl-C, as text or as lines of JSON. A run that does not exist yet is waited for."""
    with suppress(KeyboardInterrupt, Interrupted):
        looks = _looks(open_lakehouse, run, every_s)
        if as_json or not console.is_terminal:
            for facts in looks:
                console.file.write(strict_json(facts) + "\n")
                console.file.flush()
            return
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            for facts in looks:
                live.update(facts_table(describe_live(facts, options)), refresh=True)


def _looks(open_lakehouse: "Callable[[], Lakehouse]", run: str, every_s: float) -> Iterator[dict[str, Any]]:
    """Yield the result of each look until the run is finished. Until the run exists, the missing part."""
    from dlac_pipeline.extensions.look.live_status import LiveStatus
    from dlac_pipeline.lakehouse.errors import NoSuchLakehouse, NoSuchRun

    status: LiveStatus | None = None
    while True:
        try:
            status = status or LiveStatus(open_lakehouse(), run)
        except (NoSuchRun, NoSuchLakehouse) as err:
            yield {"run": run, "state": "waiting", "waits_for": str(err)}
        else:
            facts = status.look()
            yield facts
            if facts["state"] == "finished":
                return
        time.sleep(every_s)


def describe_status(facts: Mapping[str, Any], options: Sequence[str] = ()) -> dict[str, str | None]:
    """Return the result of `run_status` for people: a label and a text each, without unknown facts."""
    head = facts["head_checkpoint"]
    checkpoints = format_count(facts["checkpoints"], "checkpoint")
    reason = f" ({facts['checkpoint_reason']})" if facts["checkpoint_reason"] else ""
    interval, fruitless = facts["checkpoint_interval_s"], facts["attempts_without_progress"]
    return {
        **_describe_place(facts, facts["launch"]),
        "checkpoint": f"{head}, {format_ago(facts['head_age_s'])}{reason}" if head else "none committed yet",
        "kept": checkpoints if facts["checkpoints"] else None,
        "interval": None if interval is None else f"{format_duration(interval)}: {facts['checkpoint_interval_why']}",
        "attempt": f"{facts['attempt']:,}",
        "no progress": f"{format_count(fruitless, 'attempt')} since the last checkpoint" if fruitless > 1 else None,
        "recoveries": f"{facts['recoveries']:,}" if facts["recoveries"] else None,
        "goodput": describe_goodput(facts["goodput"]),
        "excluded": "\n".join(facts["excluded_by_rewinds"]),
        "last failure": facts.get("last_failure"),
        "next": command_with(facts["next_command"], options),
    }


def describe_goodput(goodput: Mapping[str, Any] | None) -> str | None:
    """Return the effective training time ratio with the largest causes of lost time, or None for a run without training time."""
    if goodput is None or goodput["ettr"] is None:
        return None
    low, high = (f"{goodput[name]:.1%}" for name in ("ettr", "ettr_at_most"))
    ratio = low if low == high else f"{low} to {high}"
    lost = sorted(((goodput[f"{cause}_s"], cause) for cause in _LOSSES), reverse=True)[:_LOSSES_SHOWN]
    causes = ", ".join(f"{cause} {format_duration(seconds)}" for seconds, cause in lost if seconds > 0)
    return f"{ratio} of {format_duration(goodput['wall_s'] - goodput['idle_s'])}" + (f"; {causes}" if causes else "")


def describe_live(facts: Mapping[str, Any], options: Sequence[str] = ()) -> dict[str, str | None]:
    """Return the result of a look of `LiveStatus` for people. For a run that does not exist yet, the missing part."""
    if facts["state"] == "waiting":
        return {"run": facts["run"], "state": "waiting for it to start (Ctrl-C ends this)", "found": facts["waits_for"]}
    speeds = [(facts[f"{noun}_per_s"], noun) for noun in ("steps", "samples", "tokens")]
    at_risk, fruitless = facts["at_risk_steps"], facts["attempts_without_progress"]
    share, age, sign = facts["consumed_share"], facts["checkpoint_age_s"], facts["last_sign_s"]
    risk = f"{format_count(at_risk, 'step')}, {format_duration(facts['at_risk_s'])} of training"
    return {
        **_describe_place(facts, facts["state"]),
        "speed": ", ".join(format_rate(rate, noun) for rate, noun in speeds if rate is not None),
        "consumed": None if share is None else f"{share:.1%} of the pass",
        "checkpoint": "none committed yet" if age is None else format_ago(age),
        "at risk": risk if at_risk else None,
        "attempt": f"{facts['attempt']:,}",
        "no progress": f"{format_count(fruitless, 'attempt')} since the last checkpoint" if fruitless > 1 else None,
        "time left": None if facts["eta_s"] is None else f"about {format_duration(facts['eta_s'])}",
        "last sign": None if sign is None else format_ago(sign),
        "problem": facts["problem"],
        "next": command_with(facts["next_command"], options) if facts["launch"] != "training" else None,
    }


def command_with(command: str, options: Sequence[str]) -> str:
    """Return a command, if any, with the options that name the lakehouse. A job spec among them replaces the placeholder."""
    from dlac_pipeline.extensions.look.run_state import SPEC_PLACEHOLDER

    if "--spec" in options:
        command = command.removesuffix(f" --spec {SPEC_PLACEHOLDER}")
    return " ".join([command, *map(shlex.quote, options)]) if command else ""


def _describe_place(facts: Mapping[str, Any], state: str) -> dict[str, str | None]:
    """Return the place of a run in its training for people, with the known facts about its last launch."""
    step, total = facts["step"], facts["total_steps"]
    return {
        "run": facts["run"],
        "state": f"{state}: {facts['launch_note']}" if facts["launch_note"] else state,
        "step": f"{step:,} of {total:,} ({step / total:.0%})" if total else f"{step:,}",
        "loss": None if facts["loss"] is None else f"{facts['loss']:.6g}",
    }


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
