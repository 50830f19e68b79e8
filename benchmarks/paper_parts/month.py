"""Goodput over a simulated month, with the published interruptions of Llama 3 and this page's own measured recoveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Found = dict[str, Any]
INTERRUPTIONS, DAYS = 419, 54
"""Unexpected interruptions of Llama 3 405B on 16,384 GPUs ("The Llama 3 Herd of Models", section 3.3.4)."""
_MONTH_S = 30 * 86_400
MONTHS = 1_000
_SIZE = "100M"
STARTS_S = (0.0, 180.0)
"""Seconds that a job is taken to need for its processes and communicators, in whatever way it resumes. Assumed."""


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
                name=f"bare relaunch, a checkpoint every {minutes} min",
                about="the interval is chosen, and its checkpoints are taken to cost nothing. The restart is that of 1.1 M "
                "parameters, two kills, to the first new step",
                restart_s=recovery["bare_recovery_s"],
                at_risk_s=60.0 * minutes,
                overhead=0.0,
            )
            for minutes in (60, 5)
        ]
    if recovery and "30s_overhead" in intervals:
        modes.append(
            Mode(
                name="DLAC, a checkpoint every 30 s",
                about="its cost is fitted to intervals that are long enough. The restart is that of 1.1 M parameters, two kills, "
                "to the first new step",
                restart_s=recovery["forked_recovery_s"],
                at_risk_s=intervals["30s_at_risk_s"],
                least_s=intervals["commit_most_s"],
                overhead=max(0.0, intervals["checkpoint_cost_s"] / 30),
            )
        )
    if f"{_SIZE}_at_risk_s" in memory:
        modes.append(
            Mode(
                name="DLAC, states in memory",
                about=f"all measured with {_SIZE} parameters: all ranks killed, once",
                restart_s=memory[f"{_SIZE}_node_restart_s"],
                at_risk_s=memory[f"{_SIZE}_at_risk_s"],
                overhead=memory[f"{_SIZE}_overhead"],
            )
        )
    return modes


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


def _values(found: Found, name: str) -> dict[str, float]:
    return {key: figure["value"] for key, figure in found.get(name, {}).get("figures", {}).items()}
