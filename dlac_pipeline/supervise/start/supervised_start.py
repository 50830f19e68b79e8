"""Start of an attempt by its supervisor: the claim is repeated while the catalog is unavailable, and nodes verify together."""

import time
from dataclasses import dataclass, field, replace

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.checkpoint.restore.verified_copy import verify_here
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.supervise.distributed_verify import NodeVerifiers
from dlac_pipeline.supervise.failure import Failure, failure_of_attempt
from dlac_pipeline.supervise.ranks.node_part import NodePart
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.restore import Verifying
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from dlac_pipeline.supervise.supervision import Supervision


@dataclass(frozen=True, slots=True)
class SupervisedStart:
    """Start of the attempt that a supervisor leads."""

    supervision: Supervision
    part: NodePart
    request: ClaimRequest
    failure: Failure | None
    """The failure that the attempt recovers from, if this supervisor has seen it."""
    began_at: float = field(default_factory=time.time)

    def claim(self, verifying: Verifying) -> ResumePoint:
        """Return the resume point. Raises as `start_attempt`."""
        supervision, part, request = self.supervision, self.part, self.request
        retry = supervision.retrying(replaces=request.replaces)
        if request.replaces is None:
            # Fixed before the first try, so that a launch that claims between two tries is not fenced off.
            current = retry(supervision.ledger.state, part.spec.run).fence.attempt
            request = replace(request, current=current)
        point: ResumePoint = retry(
            start_attempt,
            supervision.plans,
            part.spec,
            replace(request, launch_folder=str(part.folder), find_states=part.memory.find(part.round)),
            verifying=verifying,
            verify=NodeVerifiers(part.round).verify if part.round.others else verify_here,
            stop=supervision.stops.stop,
        )
        return point

    def find_failure(self, point: ResumePoint) -> Failure | None:
        """Return the failure that the attempt recovers from. The ledger has it if another supervisor led the failed attempt."""
        supervision = self.supervision
        if self.failure is not None or not point.replaces:
            return self.failure
        retry = supervision.retrying(replaces=self.request.replaces)
        return failure_of_attempt(
            retry(supervision.ledger.rows, self.part.spec.run, kinds=(ClaimRow, CheckpointRow)),
            point.replaces,
            noticed_by=supervision.request.noticed_by,
            noticed_at=supervision.noticed_at,
            launched_at=supervision.launched_at,
            stopped_at=self.began_at,
        )
