"""The attempts of one launch on this node, and the things of the node that all of them use."""

from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.ledger.commits import new_nonce
from dlac_pipeline.memory_states.node_memory import open_memory
from dlac_pipeline.supervise.attempt import SupervisedAttempt
from dlac_pipeline.supervise.failure import Failure
from dlac_pipeline.supervise.follower_attempt import FollowerAttempt
from dlac_pipeline.supervise.ranks.node_part import NodePart
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.ranks.run_events import RunEvents
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder
from dlac_pipeline.supervise.start.request import ClaimRequest, ResumeOptions
from dlac_pipeline.supervise.start.supervised_start import SupervisedStart
from dlac_pipeline.supervise.supervision import Supervision


class Attempts:
    """Maker of the attempts of one launch. It owns this node's states in memory, and the recorder of recoveries."""

    def __init__(self, supervision: Supervision, starter: RankStarter, events: RunEvents) -> None:
        spec = supervision.spec
        self.memory = open_memory(spec, name=f"{spec.run}@{supervision.ledger_uuid}")
        self.recorder = BackgroundRecorder(supervision.lakehouse, spec, stop=supervision.stops.stop)
        self.starter = starter
        self._supervision = supervision
        self._events = events

    def lead(
        self, round_: Round, options: ResumeOptions, *, replaces: int | None, failure: Failure | None
    ) -> SupervisedAttempt:
        """Return an attempt that this node leads. `replaces` and `failure` describe the attempt before it."""
        request = ClaimRequest(
            replaces=replaces,
            options=options,
            launched_by=self._supervision.request.launched_by,
            from_memory=failure is None or not failure.lost_memory,
        )
        part = self._part(round_, request.nonce)
        start = SupervisedStart(self._supervision, part, request, failure)
        return SupervisedAttempt(part, start, self._supervision, recorder=self.recorder, events=self._events)

    def follow(self, round_: Round, attempt: int) -> FollowerAttempt:
        """Return an attempt that another node leads. `attempt` is the last one of the run that this node knows of."""
        part, stops = self._part(round_, new_nonce()), self._supervision.stops
        return FollowerAttempt(part, stops, self.recorder, self._events.publish_here, attempt=attempt)

    def close(self) -> None:
        """Wait for the rows of recoveries, and stop to serve states in memory."""
        try:
            self.recorder.close()
        finally:
            self.memory.close()

    def _part(self, round_: Round, nonce: str) -> NodePart:
        return NodePart(self._supervision.spec, round_, nonce, starter=self.starter, memory=self.memory)
