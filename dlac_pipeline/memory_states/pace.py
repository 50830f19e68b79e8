"""The pace of states in memory on rank 0: the interval of least cost in steps, from measured times of steps and states."""

import math
import statistics
import time
from collections import deque

from dlac_pipeline.checkpoint.interval_choice import Choice, Cost, Failures, Limits, choose_interval
from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.spec.job_spec import CheckpointSpec

_COSTS = 5
"""Number of last costs whose median counts, of an even number the lower one. After a single high cost no state would be saved,
and so none measured, for long."""
_SMOOTHING = 0.2
"""Share of the newest time in a mean."""


class Pace:
    """Clocks of steps and of states, in seconds."""

    def __init__(self, settings: CheckpointSpec, point: ResumePoint) -> None:
        """The resume point has the failures before this attempt."""
        self.costs: deque[float] = deque(maxlen=_COSTS)
        """Seconds that the last states took."""
        self._failures = Failures(count=point.failures, trained_s=point.trained_s)
        self._limits, self._began = Limits.of_states(settings), time.monotonic()
        self._choice: Choice | None = None
        self.step_s = math.inf
        """Mean seconds of a step."""
        self._stepped_at: float | None = None
        self._due_at = 0.0
        self._returned_at: float | None = None
        """Time when the script got the control back after the last step. Its work until a state is saved is part of a step."""

    @property
    def steps(self) -> int:
        """Steps between two states, or 0 before the first ones have shown their cost."""
        return 0 if self._choice is None or math.isinf(self.step_s) else self._choice.steps(self.step_s)

    def step_done(self, copy_s: float) -> None:
        """Note that a step is done, with the time since the one before or since a state was saved.

        The seconds by which a copy of `copy_s` seconds beside the step may have prolonged it are a cost of the state.
        """
        now = time.monotonic()
        if self._stepped_at is not None:
            took_s = now - self._stepped_at
            slower_s = min(max(0.0, took_s - self.step_s), copy_s)
            took_s -= slower_s
            if self.costs:
                self.costs[-1] += slower_s
            is_first = math.isinf(self.step_s)
            self.step_s = took_s if is_first else (1 - _SMOOTHING) * self.step_s + _SMOOTHING * took_s
        self._stepped_at = self._due_at = now

    def return_to_script(self) -> None:
        """Note that the script works on after its step, until the state is saved."""
        self._returned_at = time.monotonic()

    def pause(self) -> None:
        """Restart both clocks after a checkpoint, which is neither a step nor a save."""
        self._stepped_at, self._due_at, self._returned_at = None, time.monotonic(), None

    def waited(self) -> None:
        """Note a wait that is neither a step's time nor a state's."""
        if self._stepped_at is not None:
            self._stepped_at = self._due_at = time.monotonic()

    def saving(self) -> float:
        """Return the seconds that the script worked on after its step."""
        return 0.0 if self._returned_at is None else time.monotonic() - self._returned_at

    def saved(self, worked_s: float, *, is_typical: bool) -> None:
        """Note that a state was saved, after work of the script. Choose again. Without `is_typical` no earlier cost counts."""
        self._stepped_at, self._returned_at = time.monotonic() - worked_s, None
        if not is_typical:
            self.costs.clear()
        self.costs.append(max(0.0, self._stepped_at - self._due_at))
        cost_s = statistics.median_low(self.costs)
        failures = self._failures.after(self._stepped_at - self._began)
        self._choice = choose_interval(Cost(lost_s=cost_s, total_s=cost_s), failures, self._limits)
