"""Monitor of an attempt's heartbeats: its step, its slow and hung ranks, and the recovery that its first new step completes.

In: heartbeats of all ranks. Out: events, and a row in `recoveries` if the attempt recovers from a failure.
"""

import math
import time
from collections.abc import Callable, Sequence

from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.failure import Failure
from dlac_pipeline.supervise.incident import Incident, RecoveryOutcome
from dlac_pipeline.supervise.liveness.hang_detector import HangDetector
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat
from dlac_pipeline.supervise.policies.stragglers import Stragglers
from dlac_pipeline.supervise.ranks.rank_events import Event

_STEP_EVENT_EVERY_S = 0.5


class AttemptMonitor:
    """Monitor of the heartbeats of one attempt."""

    def __init__(self, lakehouse: Lakehouse, launch: LaunchSpec, publish: Callable[[Event], None]) -> None:
        self.step = 0
        """Last step that all ranks have finished."""
        self.find_hang = HangDetector(launch).find_hang
        self._incident: Incident | None = None
        """The recovery in progress."""
        self._lakehouse = lakehouse
        self._publish = publish
        self._stragglers = Stragglers(launch)
        self._published_step = (0, 0)
        self._published_at = -math.inf

    def begin_recovery(self, spec: JobSpec, point: ResumePoint, failure: Failure) -> None:
        """Note that the attempt recovers from a failure."""
        self._incident = Incident(spec, point, failure)

    def observe(self, heartbeats: Sequence[RankHeartbeat | None]) -> None:
        """Note the heartbeats of all ranks, once each rank has sent one."""
        known = [found for found in heartbeats if found is not None]
        if len(known) < len(heartbeats):
            return
        self.step = max(self.step, min(found.step for found in known))
        if self._incident is not None and self._incident.observe(known):
            self.end_recovery("resumed")
        for straggler in self._stragglers.observe(known):
            self._publish(straggler.event())
        self._publish_step(known[0])

    def end_recovery(self, outcome: RecoveryOutcome) -> None:
        """Write the recovery in progress to the ledger. An error of the report does not end the run."""
        incident, self._incident = self._incident, None
        if incident is None:
            return
        try:
            self._publish(incident.report(self._lakehouse, outcome))
        except DlacError as err:
            self._publish({"event": "warning", "message": f"the recovery could not be recorded: {err}"})

    def _publish_step(self, first: RankHeartbeat) -> None:
        is_new = first.loss_step and (first.step, first.loss_step) != self._published_step
        if is_new and time.monotonic() - self._published_at >= _STEP_EVENT_EVERY_S:
            self._published_step, self._published_at = (first.step, first.loss_step), time.monotonic()
            self._publish({"event": "step", "step": first.step, "loss_step": first.loss_step, "loss": first.loss})
