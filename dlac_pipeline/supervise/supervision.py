"""Facts of one launch of a run, and the requests to stop the run or to leave it."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import tenacity

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, DlacError, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, check_tables_may_exist, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.retrying import RETRY_WITHIN_S, retrying
from dlac_pipeline.memory_states.states import check_memory
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import OPERATOR, Request


@dataclass(frozen=True, slots=True)
class StopRequests:
    """Requests to this node, from any thread. None is withdrawn."""

    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the run was asked to stop, or this node to leave it."""
    leaving: threading.Event = field(default_factory=threading.Event)
    """Set when only this node was asked to leave."""

    def leave(self) -> None:
        """Ask this node to leave the run to the other nodes."""
        self.leaving.set()
        self.stop.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """Facts of one launch, once the catalog and the store have answered."""

    request: Request
    plans: Plans
    ledger_uuid: str = ""
    stops: StopRequests = field(default_factory=StopRequests)
    launched_at: float = field(default_factory=time.time)
    """Start of this supervisor, in seconds since the epoch."""

    @classmethod
    def connect(cls, request: Request, stops: StopRequests, launched_at: float) -> "Supervision":
        """Connect to the lakehouse of a run. Raise `CatalogUnreachable` or `StoreUnavailable` after retries."""
        within_s = _retry_within_s(replaces=request.replaces, noticed_by=request.noticed_by)
        retry = retrying(within_s, of=(CatalogUnreachable, StoreUnavailable), stop=stops.stop)
        # first, because a store in a wrong folder would make the lakehouse's folder
        lakehouse = retry(connect, request.spec.lakehouse, tables=request.spec.own_tables)
        retry(tiers_of(request.spec).check_writable)
        uuid = retry(lambda: Ledger(lakehouse).table_uuid)
        return cls(request=request, plans=Plans(lakehouse), ledger_uuid=uuid, stops=stops, launched_at=launched_at)

    @property
    def spec(self) -> JobSpec:
        """Job spec of the run."""
        return self.request.spec

    @property
    def lakehouse(self) -> Lakehouse:
        """Lakehouse of the run."""
        return self.plans.lakehouse

    @property
    def ledger(self) -> Ledger:
        """Ledger of the lakehouse."""
        return Ledger(self.lakehouse)

    @property
    def noticed_at(self) -> float:
        """Moment at which the failure was noticed that the first attempt recovers from, in seconds since the epoch."""
        noticed_at = self.request.noticed_at
        return self.launched_at if noticed_at is None else min(noticed_at, self.launched_at)

    def retrying(self, *outages: type[DlacError], replaces: int | None) -> tenacity.Retrying:
        """Return retries of a call, by default while the catalog is unavailable. A recovery retries until it is stopped."""
        within_s = _retry_within_s(replaces=replaces, noticed_by=self.request.noticed_by)
        return retrying(within_s, of=outages or CatalogUnreachable, stop=self.stops.stop)


def check_request(request: Request) -> None:
    """Check a launch as far as this node can, without waiting for the catalog. Raises as `Request.check_here`."""
    request.check_here()
    check_memory(request.spec)
    with suppress(CatalogUnreachable):  # which a recovery waits for later
        # before the starter makes a folder in the home folder
        check_tables_may_exist(request.spec.lakehouse, request.spec.own_tables)


def _retry_within_s(*, replaces: int | None, noticed_by: str) -> float:
    """Return the seconds for which a launch retries an unavailable catalog or store: 0 if a person starts it."""
    return RETRY_WITHIN_S if replaces is not None or noticed_by != OPERATOR else 0.0
