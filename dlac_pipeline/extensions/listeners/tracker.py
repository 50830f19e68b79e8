"""Tracking of experiments: a tracked run for each branch of a training run, over all its launches.

A tracked run cannot lose a metric. So a branch that a rewind abandons keeps its tracked run, and the next branch has another one,
with the losses that both share. See docs/design/0012-extensions.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from dlac_pipeline.extensions.listeners import events
from dlac_pipeline.extensions.listeners.ledger_events import read_shared_losses
from dlac_pipeline.spec.job_spec import JobSpec

Metrics = list[tuple[int, Mapping[str, float]]]
"""Step, and values by name."""


def branch_name(run: str, branch: int) -> str:
    """Return the name of a branch's tracked run."""
    return run if branch == 1 else f"{run} (branch {branch})"


class Tracker(ABC):
    """Listener that writes to a tracking server."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._loss_step = 0
        """Step of the last sampled loss."""

    def on_event(self, event: events.RunEvent) -> None:
        """Write an event to the tracked run."""
        if isinstance(event, events.AttemptStarted):
            if self.start(event):
                losses = read_shared_losses(self._spec, event.resumed_from)
                self.log(event, [(step, {"loss": loss}) for step, loss in losses.items()])
            self._sample(event, event.gauges())
        elif isinstance(event, events.ProgressMade):
            self._sample(event, event.gauges())
        elif isinstance(event, events.CheckpointCommitted):
            first = event.step - len(event.losses) + 1
            self.log(event, [(first + place, {"loss": loss}) for place, loss in enumerate(event.losses)])
            facts = {name: getattr(event, name) for name in ("checkpoint_id", "location", "ledger_snapshot_id")}
            self.note({"checkpoint_step": event.step, **facts})
        elif isinstance(event, events.RecoveryEnded):
            self.note({"recovery_s": event.phases[-1].end - event.phases[0].start, "recovery_cause": event.cause})
        elif isinstance(event, events.AttemptEnded):
            self.end(event)
        elif isinstance(event, events.RunBegun):
            self.begin(
                event, {name: getattr(event, name) for name in ("parent_run", "origin", "origin_id", "origin_step")}
            )
        elif isinstance(event, events.WentBack) and (event.abandoned or event.restored):
            because = f"{event.cause}: {event.reason}" if event.reason else event.cause
            self.leave(event, {"state": "abandoned", "abandoned_after_step": event.step, "abandoned_because": because})
        elif isinstance(event, events.CheckpointsRetired):
            self.retire(event)

    def _sample(self, event: events.RunEvent, gauges: dict[str, float]) -> None:
        """Log sampled values at their steps. The loss is one of an earlier step."""
        step, loss_step = int(gauges.pop("step")), int(gauges.pop("loss_step", 0))
        loss = gauges.pop("loss", None)
        self.log(event, [(step, {f"progress/{name}": value for name, value in gauges.items()})])
        if loss is not None and loss_step != self._loss_step:
            self._loss_step = loss_step
            self.log(event, [(loss_step, {"progress/loss": loss})])

    @abstractmethod
    def start(self, event: events.AttemptStarted) -> bool:
        """Open the tracked run of the branch, or create it, and note the inputs of the attempt. Return True if it is new."""

    @abstractmethod
    def begin(self, event: events.RunBegun, facts: Mapping[str, object]) -> None:
        """Create the tracked run of a run that begins with an existing state, with facts about that state."""

    @abstractmethod
    def leave(self, event: events.WentBack, facts: Mapping[str, object]) -> None:
        """Set facts about the tracked run of the branch that was left."""

    @abstractmethod
    def retire(self, event: events.CheckpointsRetired) -> None:
        """Mark the tracked runs whose last checkpoint is retired."""

    @abstractmethod
    def log(self, event: events.RunEvent, metrics: Metrics) -> None:
        """Add values of metrics."""

    @abstractmethod
    def note(self, facts: Mapping[str, object]) -> None:
        """Set facts about the run. Each replaces the last one of its name."""

    @abstractmethod
    def end(self, event: events.AttemptEnded) -> None:
        """Set the state of the run."""
