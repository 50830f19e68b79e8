"""Tracking of experiments: one tracked run per training run, over all its launches. See docs/design/0019-listeners.md."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from dlac_pipeline.integrations.listeners import events

Metrics = list[tuple[int, Mapping[str, float]]]
"""Step, and values by name."""


class Tracker(ABC):
    """Listener that writes to a tracking server."""

    def on_event(self, event: events.RunEvent) -> None:
        """Write an event to the tracked run."""
        if isinstance(event, events.AttemptStarted):
            self.start(event)
        elif isinstance(event, events.ProgressMade):
            gauges = {f"progress/{name}": value for name, value in event.gauges().items() if name != "step"}
            self.log(event, [(event.step, gauges)])
        elif isinstance(event, events.CheckpointCommitted):
            first = event.step - len(event.losses) + 1
            self.log(event, [(first + place, {"loss": loss}) for place, loss in enumerate(event.losses)])
            facts = {name: getattr(event, name) for name in ("checkpoint_id", "location", "ledger_snapshot_id")}
            self.note({"checkpoint_step": event.step, **facts})
        elif isinstance(event, events.RecoveryEnded):
            self.note({"recovery_s": event.phases[-1].end - event.phases[0].start, "recovery_cause": event.cause})
        elif isinstance(event, events.AttemptEnded):
            self.end(event)

    @abstractmethod
    def start(self, event: events.AttemptStarted) -> None:
        """Open the run of this training run, or create it, and note what the attempt reads."""

    @abstractmethod
    def log(self, event: events.RunEvent, metrics: Metrics) -> None:
        """Add values of metrics."""

    @abstractmethod
    def note(self, facts: Mapping[str, object]) -> None:
        """Set facts about the run. Each replaces the last one of its name."""

    @abstractmethod
    def end(self, event: events.AttemptEnded) -> None:
        """Set the state of the run."""
