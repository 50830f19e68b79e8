"""Events of a run, for the program that supervises it and for the listeners that the job spec names."""

from collections.abc import Callable
from pathlib import Path

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.supervise.ranks.listener_process import ListenerProcess, describe_attempt
from dlac_pipeline.supervise.ranks.rank_events import Event


class RunEvents:
    """Publisher of the events of a run. Listeners receive the events of the node that leads."""

    def __init__(
        self, run: str, on_event: Callable[[Event], None], listeners: ListenerProcess | None = None, *, ledger: str = ""
    ) -> None:
        """`ledger`: identity of the ledger, which listeners receive."""
        self._run = run
        self._on_event = on_event
        self._listeners = listeners
        self._ledger = ledger

    def publish(self, event: Event) -> None:
        """Publish an event of the node that leads, or of the run."""
        self.publish_here(event)
        if self._listeners is not None:
            self._listeners.send(event)

    def publish_here(self, event: Event) -> None:
        """Publish an event of a node that follows. No listener receives it."""
        self._on_event({"run": self._run, **event})

    def publish_start(self, point: ResumePoint, plans: Plans, share: Share, folder: Path) -> None:
        """Publish to listeners that an attempt starts, once the plans of its leg have been read."""
        if self._listeners is not None:
            start = describe_attempt(point, plans, world_size=share.world_size, nodes=share.nodes, folder=folder)
            self._listeners.send({**start, "ledger": self._ledger})
