"""Rank 0's clock between checkpoints. Its interval is fixed, or follows from measured costs and failures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlac_pipeline.checkpoint.interval_choice import Choice, Cost, Failures, Limits, choose_interval
from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.checkpoint.step_sync import SYNC_EVERY_S
from dlac_pipeline.spec.job_spec import CheckpointSpec

_NEWS = 0.1
"""Relative change of the interval that is worth an event."""


class Interval:
    """The clock with a fixed interval, in seconds of training. Moments are monotonic seconds."""

    def __init__(self, choice: Choice, now: float) -> None:
        self.choice = choice
        self._since = now
        self._took_s = 0.0

    def is_due(self, now: float) -> bool:
        """Return True if the interval has passed."""
        return now - self._since >= self.choice.interval_s

    def needed_s(self, now: float, *, in_background: bool) -> float:
        """Return how long a checkpoint takes that begins now, by the last one. `in_background`: one is in progress."""
        left_s = max(0.0, self._since + self._took_s - now) if in_background else 0.0
        return left_s + self._took_s

    def note(self) -> dict[str, Any]:
        """The choice, for the row of a checkpoint."""
        choice = self.choice
        return {"interval_s": choice.interval_s, "why": choice.reason} if math.isfinite(choice.interval_s) else {}

    def step_done(self, now: float, *, in_background: bool) -> None:
        """Note a step. `in_background`: a checkpoint is being committed in the background, which may slow it down."""

    def taken(self, now: float) -> None:
        """Note that a checkpoint was taken, or passed on to be committed in the background."""
        self._since = now

    def committed(self, now: float, phases: Mapping[str, float]) -> None:
        """Note the seconds of the phases of a committed checkpoint."""
        self._took_s = phases["total"]

    def news(self) -> Choice | None:
        """Return the choice, if it differs from the last one reported. A fixed one is not reported."""
        return None


class AutomaticInterval(Interval):
    """The clock with the interval that costs the least, by measurements."""

    def __init__(self, limits: Limits, now: float, *, cost: Cost | None, failures: Failures) -> None:
        super().__init__(choose_interval(cost, failures, limits), now)
        self._limits = limits
        self._began = self._stepped = now
        self._cost = cost
        self._before = failures
        self._idle, self._busy = _Pace(), _Pace()
        self._reported_s = 0.0

    def step_done(self, now: float, *, in_background: bool) -> None:
        """Note a step. `in_background`: a checkpoint is being committed in the background, which may slow it down."""
        (self._busy if in_background else self._idle).add(now - self._stepped)
        self._stepped = now

    def taken(self, now: float) -> None:
        """Note that a checkpoint was taken, or passed on to be committed in the background."""
        super().taken(now)
        self._stepped = now

    def committed(self, now: float, phases: Mapping[str, float]) -> None:
        """Take the cost of a checkpoint into account, and choose again."""
        super().committed(now, phases)
        lost_s = phases["stall"] + self._busy.slower_than(self._idle)
        self._busy = _Pace()
        if self._cost is not None:
            lost_s = (lost_s + self._cost.lost_s) / 2  # one slow disk does not make a rule
        self._cost = Cost(lost_s=lost_s, total_s=self._took_s)
        self.choice = choose_interval(self._cost, self._before.after(now - self._began), self._limits)

    def news(self) -> Choice | None:
        """Return the choice, if it differs from the last one reported."""
        choice = self.choice
        if abs(choice.interval_s - self._reported_s) <= _NEWS * self._reported_s:
            return None
        self._reported_s = choice.interval_s
        return choice


@dataclass(slots=True)
class _Pace:
    steps: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds

    def slower_than(self, other: "_Pace") -> float:
        """Return the seconds that these steps took longer than as many further steps, or 0 without a comparison."""
        if not self.steps or not other.steps:
            return 0.0
        return max(0.0, self.seconds - self.steps * other.seconds / other.steps)


def open_interval(settings: CheckpointSpec, point: ResumePoint, now: float) -> Interval:
    """Return the clock that the settings ask for. The resume point has the cost and the failures before this attempt."""
    if not settings.is_automatic:
        return Interval(Choice(interval_s=settings.every_s or math.inf, reason="as set in the job spec"), now)
    cost = Cost(lost_s=point.checkpoint_cost[0], total_s=point.checkpoint_cost[1]) if point.checkpoint_cost else None
    failures = Failures(count=point.failures, trained_s=point.trained_s)
    return AutomaticInterval(checkpoint_limits(settings), now, cost=cost, failures=failures)


def checkpoint_limits(settings: CheckpointSpec) -> Limits:
    """Return the limits of the interval between checkpoints."""
    return Limits(point_s=settings.every_s or math.inf, agreed_s=SYNC_EVERY_S)
