"""Overhead against work at risk: `python -m benchmarks.intervals [--quick] [--intervals S ...] [--pairs N] [--model NAME]`.

One rank trains the model of benchmarks/training.py, of 99 million parameters, or of 10 million with `--quick`, with asynchronous
checkpoints to disk. Blocks with a checkpoint every 5, 10 or 30 s alternate with blocks without, in one process. A block with
checkpoints is compared with the two that surround it, and those with each other (A/A). Work at risk is the longest time from the
moment of a state to the next commit: a failure just before that commit loses so much. Intervals of 60 s and 5 min, and the one
that DLAC chooses for this cost before the first failure, are modelled: the measured cost of a checkpoint over the interval, and
the interval plus the measured time until a commit.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.training import FULL, QUICK, train
from dlac_pipeline.checkpoint.interval import checkpoint_limits
from dlac_pipeline.checkpoint.interval_choice import Cost, Failures, choose_interval
from dlac_pipeline.spec.job_spec import CheckpointSpec

_MODELS = {"10M": QUICK, "99M": {**FULL, "tokens": "8"}}
"""Fewer tokens keep steps far shorter than the shortest interval."""
_MODELLED_S = {"60s": 60.0, "300s": 300.0}
_MOST_OVERHEAD = 0.02
_MOST_STEPS = 100_000
_CHECKPOINTS = {5.0: 4, 10.0: 2}
"""Interval -> checkpoints of a block. Two for others, which is the least with a time between commits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Training with checkpoints at one interval, beside training without."""

    interval_s: float
    overhead: float
    """Time of a step in blocks with checkpoints beyond that in the blocks around them, as a share of it. Median of the blocks."""
    between_commits_s: float
    """The longest time between two commits."""
    at_risk_s: float
    """The longest time from the moment of a state to the next commit."""
    commit_s: float
    """The longest time from the moment of a state to its own commit."""
    noise: tuple[float, float]
    """Least and greatest ratio of two blocks without checkpoints."""

    @property
    def is_steady(self) -> bool:
        """True if each checkpoint is committed before the next one is due."""
        return self.commit_s <= self.interval_s


def main() -> None:
    """Measure each interval, model longer ones, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the small model, 5 s, and one pair of blocks")
    parser.add_argument("--intervals", type=float, nargs="*", help="seconds between two checkpoints")
    parser.add_argument("--pairs", type=int, default=0, help="blocks with checkpoints, for each interval")
    parser.add_argument("--model", choices=_MODELS, help="number of parameters")
    chosen = parser.parse_args()
    intervals = chosen.intervals or ([5.0] if chosen.quick else [5.0, 10.0, 30.0])
    pairs = chosen.pairs or (1 if chosen.quick else 10)
    params = _MODELS[chosen.model or ("10M" if chosen.quick else "99M")]
    found, state_bytes = [], 0.0
    for interval_s in intervals:
        with tempfile.TemporaryDirectory(prefix="dlac-intervals-") as home:
            raw = train_in_blocks(Path(home), params, interval_s, pairs)
        found.append(measured_of(interval_s, raw))
        state_bytes = raw["checkpoints"][-1]["bytes"]
        print(json.dumps({"interval_s": interval_s, "blocks": raw["blocks"]}), flush=True)
    figures = {
        "state_bytes": Figure(value=state_bytes, unit="bytes"),
        "pairs": Figure(value=pairs, unit="blocks"),
        "without_over_without_low": Figure(value=min(each.noise[0] for each in found), unit="ratio"),
        "without_over_without_high": Figure(value=max(each.noise[1] for each in found), unit="ratio"),
        **figures_of(found),
        "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
    }
    report("intervals", figures)


def train_in_blocks(home: Path, params: dict[str, str], interval_s: float, pairs: int) -> dict[str, Any]:
    """Train with checkpoints so many seconds apart in every other block. Return what the rank measured, and its checkpoints."""
    checkpoints = _CHECKPOINTS.get(interval_s, 2)
    blocks = {"interval_s": str(interval_s), "checkpoints": str(checkpoints), "pairs": str(pairs)}
    return train(
        home,
        {**params, **blocks},
        steps=_MOST_STEPS,
        checkpoint={"every_steps": 10 * _MOST_STEPS, "keep_last": 1, "memory": ""},
        environment={"OMP_NUM_THREADS": "2"},
    )


def measured_of(interval_s: float, raw: Mapping[str, Any]) -> Measured:
    """Return what a training measured: its blocks, the ends of its steps, and its checkpoints.

    Raises:
        RuntimeError: no block has two checkpoints, because a step takes longer than the interval.
    """
    step_s = [block["seconds"] / (block["last"] - block["first"]) for block in raw["blocks"]]
    around = [statistics.mean(pair) for pair in pairwise(step_s[0::2])]
    ratios = [one / beside for one, beside in zip(step_s[1::2], around, strict=True)]
    same = [after / before for before, after in pairwise(step_s[0::2])]
    between, at_risk, until = [], [], []
    for block in raw["blocks"][1::2]:
        taken = [event for event in raw["checkpoints"] if block["first"] <= event["step"] < block["last"]]
        states = [raw["stamps_s"][event["step"] - 1] for event in taken]
        commits = [state + event["phases"]["total"] for state, event in zip(states, taken, strict=True)]
        until += [commit - state for state, commit in zip(states, commits, strict=True)]
        between += [later - commit for commit, later in pairwise(commits)]
        at_risk += [later - state for state, later in zip(states, commits[1:], strict=False)]
    if not between:
        found = f"found blocks {raw['blocks']!r}: name longer --intervals, or a smaller --model"
        raise RuntimeError(f"expected two checkpoints in a block at an interval of {interval_s:g} s, {found}")
    return Measured(
        interval_s=interval_s,
        overhead=statistics.median(ratios) - 1,
        between_commits_s=max(between),
        at_risk_s=max(at_risk),
        commit_s=max(until),
        noise=(min(same), max(same)),
    )


def cost_of(found: Sequence[Measured]) -> float:
    """Return the seconds that a checkpoint costs: of all intervals that are long enough for a commit, or of the longest one.

    An overhead is the cost over the interval, so it is fitted by least squares to the overheads over the inverse intervals.
    """
    fitted = [each for each in found if each.is_steady] or [max(found, key=lambda each: each.interval_s)]
    inverse = [1 / each.interval_s for each in fitted]
    products = [each.overhead * per_s for each, per_s in zip(fitted, inverse, strict=True)]
    return sum(products) / sum(per_s**2 for per_s in inverse)


def figures_of(found: Sequence[Measured]) -> dict[str, Figure]:
    """Return the figures of the measured intervals, of the modelled ones, and of the one at which the overhead is 2 %.

    Measured ones have the paper's bars. Their overhead has none if blocks without checkpoints differ by more than it may be.
    """
    cost_s, commit_s = cost_of(found), max(each.commit_s for each in found)
    noise = max(each.noise[1] for each in found) - min(each.noise[0] for each in found)
    overhead_bar = f"<= {100 * _MOST_OVERHEAD:g}" if noise < _MOST_OVERHEAD else None
    figures: dict[str, Figure] = {}
    for each in found:
        name = f"{each.interval_s:g}s"
        figures |= {
            f"{name}_overhead": Figure(value=100 * each.overhead, unit="% of the time", bar=overhead_bar),
            f"{name}_between_commits_s": Figure(value=each.between_commits_s, unit="s"),
            f"{name}_at_risk_s": Figure(value=each.at_risk_s, unit="s", bar="<= 30"),
        }
    cost = Cost(lost_s=max(0.0, cost_s), total_s=commit_s)
    chosen = choose_interval(cost, Failures(), checkpoint_limits(CheckpointSpec()))
    for modelled, interval_s in {**_MODELLED_S, "auto": chosen.interval_s}.items():
        name = f"modelled_{modelled}"
        figures |= {
            f"{name}_overhead": Figure(value=100 * cost_s / interval_s, unit="% of the time"),
            f"{name}_between_commits_s": Figure(value=interval_s, unit="s"),
            f"{name}_at_risk_s": Figure(value=interval_s + commit_s, unit="s"),
        }
    return figures | {
        "checkpoint_cost_s": Figure(value=cost_s, unit="s"),
        "commit_most_s": Figure(value=commit_s, unit="s"),
        "modelled_at_risk_at_2_percent_s": Figure(value=cost_s / _MOST_OVERHEAD + commit_s, unit="s"),
    }


if __name__ == "__main__":
    main()
