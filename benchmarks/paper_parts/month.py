"""Goodput over a simulated month, with the published interruptions of Llama 3 and this page's own measured recoveries."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from dlac_pipeline.checkpoint.interval import checkpoint_limits
from dlac_pipeline.checkpoint.interval_choice import Cost, Failures, Limits, choose_interval
from dlac_pipeline.spec.job_spec import CheckpointSpec

Found = dict[str, Any]
INTERRUPTIONS, DAYS = 419, 54
"""Unexpected interruptions of Llama 3 405B on 16,384 GPUs ("The Llama 3 Herd of Models", section 3.3.4)."""
_MONTH_S = 30 * 86_400
MONTHS = 1_000
_SIZE = "100M"
STARTS_S = (0.0, 180.0)
"""Seconds that a job is taken to need for its processes and communicators, in whatever way it resumes. Assumed."""
_FAILURES = Failures(count=INTERRUPTIONS, trained_s=DAYS * 86_400.0)
_SETTINGS = CheckpointSpec()
_BARE, _STATES = "bare relaunch", "DLAC, states in memory"
_LEAST_SHARE = 99.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A way to survive, by what it costs. `about` says what was not measured."""

    name: str
    about: str
    restart_s: float
    """From the failure to the next step. That may be a repeated one, which counts as lost work."""
    at_risk_s: float
    """Longest time from a state to the next one, or its commit. A failure loses at most so much."""
    least_s: float = 0.0
    """A failure loses at least so much: the time until a commit."""
    overhead: float
    """Share of the time spent on states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Share of the month in which steps were trained that counted: its mean, and the range of 90 % of the months."""

    mode: Mode
    mean: float
    low: float
    high: float


def modes_of(found: Found) -> list[Mode]:
    """Return the modes whose figures were measured."""
    recovery, memory, intervals = (_values(found, name) for name in ("recovery", "memory_recovery", "intervals"))
    modes = []
    if recovery:
        modes += [
            Mode(
                name=f"{_BARE}, a checkpoint every {minutes} min",
                about="the interval is chosen, and its checkpoints are taken to cost nothing. The restart is that of 1.1 M "
                "parameters, two kills, to the first new step",
                restart_s=recovery["bare_recovery_s"],
                at_risk_s=60.0 * minutes,
                overhead=0.0,
            )
            for minutes in (60, 5)
        ]
    if recovery and "checkpoint_cost_s" in intervals:
        modes.append(_checkpoints(recovery["forked_recovery_s"], intervals))
    if f"{_SIZE}_state_s" in memory:
        modes.append(_states(memory))
    return modes


def _checkpoints(restart_s: float, intervals: dict[str, float]) -> Mode:
    """Return the mode with checkpoints at the interval that DLAC chooses for their cost and these failures."""
    cost = Cost(lost_s=max(0.0, intervals["checkpoint_cost_s"]), total_s=intervals["commit_most_s"])
    limits = checkpoint_limits(_SETTINGS)
    interval_s = choose_interval(cost, _FAILURES, limits).interval_s + limits.agreed_s
    return Mode(
        name=f"DLAC, a checkpoint every {interval_s:.0f} s",
        about="DLAC's choice for a cost that is fitted to measured intervals. The restart is that of 1.1 M parameters, two "
        "kills, to the first new step",
        restart_s=restart_s,
        at_risk_s=interval_s + cost.total_s,
        least_s=cost.total_s,
        overhead=cost.lost_s / (interval_s + cost.lost_s),
    )


def _states(memory: dict[str, float]) -> Mode:
    """Return the mode with states in memory at the interval that DLAC chooses for their cost and these failures."""
    cost_s, step_s = memory[f"{_SIZE}_state_s"], memory[f"{_SIZE}_step_s"]
    choice = choose_interval(Cost(lost_s=cost_s, total_s=cost_s), _FAILURES, Limits.of_states(_SETTINGS))
    interval_s = choice.steps(step_s) * step_s
    return Mode(
        name=_STATES,
        about=f"DLAC's choice for the measured cost of a state of {_SIZE} parameters: {choice.steps(step_s)} steps. The restart "
        "is measured with them: all ranks killed",
        restart_s=memory[f"{_SIZE}_node_restart_s"],
        at_risk_s=interval_s + cost_s,
        overhead=cost_s / (interval_s + cost_s),
    )


def simulate(mode: Mode, *, start_s: float, seed: int = 0) -> Goodput:
    """Return the goodput of many months with failures at random times, each followed by a restart."""
    chance = np.random.default_rng(seed)
    rate = INTERRUPTIONS / (DAYS * 86_400)
    shares = []
    for failures in chance.poisson(rate * _MONTH_S, size=MONTHS):
        lost = chance.uniform(mode.least_s, mode.at_risk_s, size=failures).sum()
        down = failures * (mode.restart_s + start_s)
        shares.append(max(0.0, (_MONTH_S - down) * (1 - mode.overhead) - lost) / _MONTH_S)
    low, high = np.quantile(shares, (0.05, 0.95))
    return Goodput(mode=mode, mean=float(np.mean(shares)), low=float(low), high=float(high))


def figures_of_month(found: Found) -> dict[str, Figure]:
    """Return the goodput with states in memory, and how far it is above that of every bare relaunch."""
    figures: dict[str, Figure] = {}
    for start_s in STARTS_S if f"{_SIZE}_state_s" in _values(found, "memory_recovery") else ():
        shares = {mode.name: 100 * simulate(mode, start_s=start_s).mean for mode in modes_of(found)}
        states = shares.pop(_STATES)
        best = max((share for name, share in shares.items() if name.startswith(_BARE)), default=0.0)
        bar = f">= {_LEAST_SHARE}" if start_s == 0 else None
        figures |= {
            f"month_{start_s:.0f}s_states": Figure(value=states, unit="% of the time", bar=bar),
            f"month_{start_s:.0f}s_above_bare": Figure(value=states - best, unit="% of the time", bar=">= 0"),
        }
    return figures


def _values(found: Found, name: str) -> dict[str, float]:
    return {key: figure["value"] for key, figure in found.get(name, {}).get("figures", {}).items()}
