"""Reports without a supervisor: rank 0 records its recovery from a failure, and passes its events to the listeners."""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.elastic.ranks.this_process import this_process, was_restarted
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.failure import failure_of_attempt, planned_end
from dlac_pipeline.supervise.liveness.heartbeat import Phase
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.supervise.ranks.run_events import describe_attempt
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder

_log = logging.getLogger(__name__)


class OwnRecoveries:
    """Recoveries that rank 0 records without a supervisor. Other ranks, and ranks under a supervisor, record none."""

    def __init__(self, lakehouse: Lakehouse, spec: JobSpec, events: EventWriter) -> None:
        self._lakehouse = lakehouse
        self._spec = spec
        self.events = events
        """Receives the events of written rows."""
        self._recorder = RecoveryRecorder(lakehouse, spec)

    def begin(self, point: ResumePoint, *, claimed_at: float) -> None:
        """Begin to record the recovery of this attempt if one before it failed. An error of the record is only logged."""
        if not point.replaces or this_process().local_rank is None:
            return
        try:
            failure = failure_of_attempt(
                Ledger(self._lakehouse).rows(self._spec.run, kinds=(ClaimRow, CheckpointRow)),
                point.replaces,
                noticed_by="torchrun" if was_restarted() else OPERATOR,
                noticed_at=psutil.Process().create_time(),
                launched_at=claimed_at,
                stopped_at=claimed_at,
            )
            if failure is not None:
                self._recorder.begin(point, failure)
        except DlacError as err:
            _log.warning("the recovery cannot be recorded: %s", err)

    def observe(self, heartbeat: HeartbeatWriter, phase: Phase) -> None:
        """Record the recovery once the first step of the attempt is done."""
        if self._recorder.in_progress:
            with _only_logged():
                self._recorder.observe([heartbeat.now(phase)], self.events.write)

    def fail(self) -> None:
        """Record that the recovery failed before the first step. Without a recovery in progress nothing is recorded."""
        if self._recorder.in_progress:
            with _only_logged():
                self._recorder.end("failed again", self.events.write)

    def give_up(self, err: DlacError, *, attempt: int, step: int) -> None:
        """Record that no attempt follows this one."""
        failure = planned_end(f"{type(err).__name__}: {err}", step=step)
        self._recorder.give_up(replace(failure, noticed_by="rank 0"), attempt, self.events.write, reason=str(err))


@contextmanager
def _only_logged() -> Iterator[None]:
    """Log an error of a record, and leave the script's random generator unchanged."""
    state = random.getstate()
    try:
        yield
    except DlacError as err:
        _log.warning("the recovery could not be recorded: %s", err)
    finally:
        random.setstate(state)


def start_listeners(
    plans: Plans, spec: JobSpec, point: ResumePoint, events: EventWriter, folder: Path | None, held: ExitStack
) -> None:
    """Pass the events of rank 0 to the listeners, until `held` ends them. An outage of the catalog is only logged."""
    receiver = spec.event_receiver()
    if receiver is None:
        return
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    try:
        start = describe_attempt(point, plans, world_size=spec.launch.world_size, nodes=nodes, folder=folder)
        start["ledger"] = Ledger(plans.lakehouse).table_uuid
    except DlacError as err:
        _log.warning("attempt %d of run %r has no listeners: %s", point.attempt, spec.run, err)
        return
    held.enter_context(receiver)
    receiver.send(start)
    events.receive = receiver.send
