"""Rank 0's clock between checkpoints. Its interval is fixed, or an extension chooses it for `checkpoint.every_steps = "auto"`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import JobSpec

INTERVALS = Door("dlac.intervals", "choice of intervals")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An interval and the reason for it."""

    interval_s: float
    reason: str


class Interval:
    """The clock with a fixed interval, in seconds of training. Moments are monotonic seconds.

    An entry of `dlac.intervals` is a function with the arguments of `open_interval`, which returns an object of a subclass.
    """

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


def open_interval(spec: JobSpec, lakehouse: Lakehouse, now: float) -> Interval:
    """Return the clock that a job spec asks for. Raises `BadInput` as `Door.load`."""
    settings = spec.checkpoint
    if not settings.is_automatic:
        return Interval(Choice(interval_s=settings.every_s or math.inf, reason="as set in the job spec"), now)
    found: Interval = INTERVALS.load("auto", setting="checkpoint.every_steps")(spec, lakehouse, now)
    return found
