"""Events of a run, for the program that supervises it and for the listeners that the job spec names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.sections import EventReceiver
from dlac_pipeline.supervise.ranks.rank_events import Event

WENT_BACK, RUN_BEGUN, RETIRED = "went_back", "run_begun", "retired"
"""Events about branches and checkpoints. The process of the listeners reads their facts from the ledger."""


def describe_attempt(point: ResumePoint, plans: Plans, *, world_size: int, nodes: int, folder: Path | None) -> Event:
    """Return the start of an attempt, for listeners. The plans of its leg have been read before."""
    tables = tables_of(Leg.from_json(point.leg), plans)
    names = ("attempt", "step", "head_step", "branch", "went_back")
    start = {"event": "claimed", "resumed_from": point.checkpoint_id, **{name: getattr(point, name) for name in names}}
    return {**start, "tables": tables, "world_size": world_size, "nodes": nodes, "folder": str(folder or "")}


def tables_of(leg: Leg, plans: Plans) -> list[dict[str, Any]]:
    """Return the tables that a leg reads, with the fields of an `InputTable`."""
    return [
        {
            "name": each.name,
            "table": each.table,
            "snapshot_id": each.snapshot_id,
            "rows": plans.row(each.plan_id).live_rows,
        }
        for each in leg.sources
    ]


def report_command(spec: JobSpec | None, event: Event) -> None:
    """Pass an event of a command to the run's listeners, and wait for them."""
    receiver = None if spec is None else spec.event_receiver(is_command=True)
    if receiver is not None:
        with receiver:
            receiver.send(event)


class RunEvents:
    """Publisher of the events of a run. Listeners receive the events of the node that leads."""

    def __init__(
        self, run: str, on_event: Callable[[Event], None], listeners: EventReceiver | None = None, *, ledger: str = ""
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
