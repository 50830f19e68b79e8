"""Facts that all attempts of one supervisor share, and the requests to stop or to leave."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tenacity

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, DlacError, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.memory.node_memory import NodeMemory
from dlac_pipeline.supervise.ranks.listener_process import ListenerProcess, describe_attempt
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder
from dlac_pipeline.supervise.retry_policy import retry_within_s
from dlac_pipeline.supervise.start.resume_point import ResumePoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """Facts that all attempts of one supervisor share."""

    request: Request
    lakehouse: Lakehouse
    starter: RankStarter
    on_event: Callable[[Event], None]
    listeners: ListenerProcess | None = None
    """Process of the listeners that the job spec names."""
    ledger_uuid: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the run was asked to stop, or this node to leave it."""
    leaving: threading.Event = field(default_factory=threading.Event)
    """Set when only this node was asked to leave."""
    launched_at: float = field(default_factory=time.time)
    """Start of this supervisor, in seconds since the epoch."""
    plans: Plans = field(init=False)
    memory: NodeMemory = field(init=False)
    recorder: BackgroundRecorder = field(init=False)

    def __post_init__(self) -> None:
        """Find the memory states of this node, and make the plans and the recorder."""
        object.__setattr__(self, "plans", Plans(self.lakehouse))
        object.__setattr__(self, "memory", NodeMemory(self.spec, name=f"{self.spec.run}@{self.ledger_uuid}"))
        object.__setattr__(self, "recorder", BackgroundRecorder(self.lakehouse, self.spec, stop=self.stop))

    @property
    def spec(self) -> JobSpec:
        """Job spec of the run."""
        return self.request.spec

    @property
    def ledger(self) -> Ledger:
        """Ledger of the lakehouse."""
        return Ledger(self.lakehouse)

    @property
    def noticed_at(self) -> float:
        """Moment at which the failure was noticed that the first attempt recovers from, in seconds since the epoch."""
        noticed_at = self.request.noticed_at
        return self.launched_at if noticed_at is None else min(noticed_at, self.launched_at)

    def leave(self) -> None:
        """Ask this node to leave the run to the other nodes."""
        self.leaving.set()
        self.stop.set()

    def publish(self, event: Event, *, leads: bool = True) -> None:
        """Publish an event of the run. Listeners receive those of the node that leads."""
        self.on_event({"run": self.spec.run, **event})
        if leads and self.listeners is not None:
            self.listeners.send(event)

    def publish_start(self, point: ResumePoint, share: Share, folder: Path) -> None:
        """Publish to listeners that an attempt starts, once the plans of its leg have been read."""
        if self.listeners is not None:
            start = describe_attempt(point, self.plans, world_size=share.world_size, nodes=share.nodes, folder=folder)
            self.listeners.send({**start, "ledger": self.ledger_uuid})

    def retrying(self, *outages: type[DlacError], replaces: int | None) -> tenacity.Retrying:
        """Return retries of a call, by default while the catalog is unavailable. A recovery retries until it is stopped."""
        within_s = retry_within_s(replaces=replaces, noticed_by=self.request.noticed_by)
        return retrying(within_s, of=outages or CatalogUnreachable, stop=self.stop)


def connect_run(request: Request, stop: threading.Event) -> tuple[Lakehouse, str]:
    """Return the lakehouse of a run and its ledger's identity. Raise `CatalogUnreachable` or `StoreUnavailable` after retries."""
    within_s = retry_within_s(replaces=request.replaces, noticed_by=request.noticed_by)
    retry = retrying(within_s, of=(CatalogUnreachable, StoreUnavailable), stop=stop)
    # first, because a store in a wrong folder would make the lakehouse's folder
    lakehouse = retry(connect, request.spec.lakehouse, tables=request.spec.own_tables)
    retry(tiers_of(request.spec).check_writable)
    return lakehouse, retry(lambda: Ledger(lakehouse).table_uuid)
