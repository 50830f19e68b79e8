"""Listeners without a supervisor: rank 0 passes its events on to their process.

Under torchrun or another launcher rank 0 claims the run, so that it leads. The process of the listeners ends with it.
"""

import logging
import os
from contextlib import ExitStack
from pathlib import Path

from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.ranks.listener_process import ListenerProcess, describe_attempt
from dlac_pipeline.supervise.ranks.rank_events import EventWriter

_log = logging.getLogger(__name__)


def start_listeners(
    plans: Plans, spec: JobSpec, point: ResumePoint, events: EventWriter, folder: Path | None, held: ExitStack
) -> None:
    """Pass the events of rank 0 to the listeners of the job spec. `held` ends them.

    An outage of the catalog is only logged. The attempt then has no listeners.
    """
    if not spec.listeners.chosen():
        return
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    try:
        start = describe_attempt(point, plans, world_size=spec.launch.world_size, nodes=nodes, folder=folder)
        start["ledger"] = Ledger(plans.lakehouse).table_uuid
    except DlacError as err:
        _log.warning("attempt %d of run %r has no listeners: %s", point.attempt, spec.run, err)
        return
    process = held.enter_context(ListenerProcess(spec))
    process.send(start)
    events.pass_to(process.send)
