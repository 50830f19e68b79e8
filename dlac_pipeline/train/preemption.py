"""Preemption of a run: the decision if an emergency checkpoint fits in the time left, and the lost work."""

from dataclasses import dataclass
from typing import Any

from dlac_pipeline.checkpoint.step_sync import StepSync


def fits(sync: StepSync, leave_s: float) -> bool:
    """Return True if a checkpoint can be committed in the rest of `leave_s`. All ranks use the same message and agree.

    Without an earlier checkpoint as a measure, the commit is tried. The watchdog ends a commit that takes too long.
    """
    return sync.notice_age_s + sync.needed_s <= leave_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Preemption:
    """The end of a preempted run."""

    notice: str
    deadline_s: float
    step: int
    """The last finished step."""
    head: str | None
    head_step: int
    batch_size: int

    @property
    def lost_steps(self) -> int:
        """Steps that the next attempt repeats."""
        return self.step - self.head_step

    def event(self) -> dict[str, Any]:
        """Return the event for listeners."""
        return {
            "event": "preempted",
            "notice": self.notice,
            "deadline_s": self.deadline_s,
            "step": self.step,
            "committed": self.lost_steps == 0,
            "lost_steps": self.lost_steps,
            "lost_rows": self.lost_steps * self.batch_size,
            "message": self.message(),
        }

    def message(self) -> str:
        """Return the message for the log."""
        request = f"asked to exit ({self.notice}), within {self.deadline_s:g} s"
        head = "the start" if self.head is None else f"checkpoint {self.head!r} of step {self.head_step}"
        if not self.lost_steps:
            return f"{request}: {head} is committed, nothing is lost"
        return (
            f"{request}: no time for a checkpoint of step {self.step}; {head} stays the head, and {self.lost_steps} steps "
            f"({self.lost_steps * self.batch_size} rows) must be repeated"
        )
