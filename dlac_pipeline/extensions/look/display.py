"""Terminal display of runs, also of other processes: the facts of each look, for people."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live

from dlac_pipeline.audit.wording import format_ago, format_count, format_duration
from dlac_pipeline.cli.display import Interrupted
from dlac_pipeline.cli.shared import command_with, facts_table
from dlac_pipeline.lakehouse.plain_json import strict_json

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

_LOSSES = ("checkpointing", "startup", "down", "replayed", "abandoned", "unknown")
"""Causes of lost time: fields of the goodput without their `_s`."""
_LOSSES_SHOWN = 3


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
        "speed": ", ".join(_format_rate(rate, noun) for rate, noun in speeds if rate is not None),
        "consumed": None if share is None else f"{share:.1%} of the pass",
        "lag": None if facts["lag_rows"] is None else format_count(facts["lag_rows"], "row"),
        "checkpoint": "none committed yet" if age is None else format_ago(age),
        "at risk": risk if at_risk else None,
        "attempt": f"{facts['attempt']:,}",
        "no progress": f"{format_count(fruitless, 'attempt')} since the last checkpoint" if fruitless > 1 else None,
        "time left": None if facts["eta_s"] is None else f"about {format_duration(facts['eta_s'])}",
        "last sign": None if sign is None else format_ago(sign),
        "problem": facts["problem"],
        "next": command_with(facts["next_command"], options) if facts["launch"] != "training" else None,
    }


def _describe_place(facts: Mapping[str, Any], state: str) -> dict[str, str | None]:
    """Return the place of a run in its training for people, with the known facts about its last launch."""
    step, total = facts["step"], facts["total_steps"]
    return {
        "run": facts["run"],
        "state": f"{state}: {facts['launch_note']}" if facts["launch_note"] else state,
        "step": f"{step:,} of {total:,} ({step / total:.0%})" if total else f"{step:,}",
        "loss": None if facts["loss"] is None else f"{facts['loss']:.6g}",
    }


def _format_rate(per_s: float, noun: str) -> str:
    """Write a rate: 12 samples/s, 0.42 steps/s."""
    return f"{per_s:,.0f} {noun}/s" if per_s >= 10 else f"{per_s:.2g} {noun}/s"
