"""An attempt on a node that follows: it starts its ranks, and the leader decides how the attempt ends."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint, resume_point_of
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.elastic.round import LEADER, RESUME, VERDICT
from dlac_pipeline.supervise.attempt_state import AttemptMachine, AttemptState, Decision, Observation
from dlac_pipeline.supervise.distributed_verify import NodeVerifier
from dlac_pipeline.supervise.failure import Failure, planned_end
from dlac_pipeline.supervise.liveness.heartbeat import rows_of_readers
from dlac_pipeline.supervise.ranks.all_ranks import LEAVE, REQUESTS_REPORTS, STOP, report_of
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.node_part import NodePart
from dlac_pipeline.supervise.ranks.rank_events import Ending, Event
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder
from dlac_pipeline.supervise.supervision import StopRequests

_REPORT_EVERY_S = 0.2
_WAIT_S = 0.25
"""Seconds between two reads of this node's ranks. Announcements of the leader are read at once."""
_FETCH_WAIT_S = 0.01
"""The same, while this node fetches a state in memory."""
_LEAVE_MARGIN_S = 5.0
"""Extra seconds for ranks past their deadline. The leader waits for them as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptVerdict:
    """The end of an attempt for all its nodes: one of the three fields, or none if only this node exits."""

    ending: Ending | None = None
    restart: Failure | None = None
    """Failure after which all nodes gather for another attempt."""
    error: tuple[str, str] | None = None
    """Class and message of the error that ends the run on all nodes."""
    attempt: int = 0
    step: int = 0

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "AttemptVerdict":
        """Return the verdict that `asdict` made a message of."""
        return TypeAdapter(cls).validate_python(message)


class FollowerAttempt:
    """An attempt that another node leads. `attempt` is the last attempt of the run that this node knows of."""

    def __init__(
        self,
        part: NodePart,
        stops: StopRequests,
        recorder: BackgroundRecorder,
        publish: Callable[[Event], None],
        *,
        attempt: int,
    ) -> None:
        self._part = part
        self._stops = stops
        self._recorder = recorder
        self._publish_here = publish
        self._round = part.round
        self._spec = part.spec
        self._point: ResumePoint | None = None
        self._verifier = NodeVerifier(part.round, tiers_of(part.spec).files)
        self._attempt = attempt
        self._machine = AttemptMachine(has_others=True)
        self._reported_at = 0.0
        self._drains_since = 0.0

    def run(self) -> AttemptVerdict:
        """Run the whole attempt. No rank of this node is left when the call returns or raises."""
        ranks = self._part.start()
        try:
            while True:
                self._report(ranks)
                self._resume()
                for message in self._part.memory.take_warnings():
                    self._publish({"event": "warning", "message": message})
                self._recorder.publish_written()
                if self._point is not None:
                    self._heal(ranks, self._point.nonce)
                for observation in self._observe(ranks):
                    verdict = self._apply(observation, ranks)
                    if verdict is not None:
                        return verdict
                self._round.wait(_WAIT_S if self._part.has_point or self._point is None else _FETCH_WAIT_S)
        finally:
            self._verifier.close()
            self._part.end(ranks)

    def _observe(self, ranks: RankGroup) -> Iterator[Observation]:
        """Yield what is observed now. The leader's verdict precedes all else."""
        if self._point is not None and self._machine.state is AttemptState.STARTING and ranks.processes.is_started:
            # Until now the ranks imported, and this node followed the leader.
            share, pids = self._round.share, ranks.processes.pids
            nodes = {"leader": self._round.hosts[LEADER], "ranks": list(ranks.ranks), "world_size": share.world_size}
            self._publish({"event": "attempt", "step": self._point.step, "pids": pids, **nodes})
            yield Observation.TRAINING_BEGAN
        if self._round.announced(VERDICT) is not None:
            yield Observation.VERDICT_RECEIVED
        if self._round.cut_off or LEADER in self._round.lost_nodes():
            yield Observation.LEADER_LOST
        if ranks.has_notice:
            yield Observation.NOTICE_RECEIVED
        if self._stops.stop.is_set():
            yield Observation.STOP_REQUESTED
        drained_s = time.monotonic() - self._drains_since
        if self._machine.state is AttemptState.DRAINING and drained_s > self._spec.launch.deadline_s + _LEAVE_MARGIN_S:
            yield Observation.DEADLINE_PASSED

    def _apply(self, observation: Observation, ranks: RankGroup) -> AttemptVerdict | None:
        """Do what an observation requires. Return the verdict once the attempt has ended on this node."""
        decision = self._machine.observe(observation)
        if decision is Decision.LEAVE:
            self._stops.leave()
        elif decision is Decision.REQUEST_STOP:
            self._drains_since = time.monotonic()
            ranks.request_stop()
        elif decision is Decision.END_AS_REPORTED:
            self._round.acknowledge()
            return AttemptVerdict.from_message(self._round.announced(VERDICT) or {})
        elif decision is Decision.FAIL:
            lost = observation is Observation.LEADER_LOST
            return self._report_lost_leader(ranks) if lost else AttemptVerdict(attempt=self._attempt)
        return None

    def _report(self, ranks: RankGroup) -> None:
        if time.monotonic() < self._reported_at + _REPORT_EVERY_S:
            return
        self._reported_at = time.monotonic()
        answers = bool(self._round.message_of(LEADER).get(REQUESTS_REPORTS))  # before the ranks are read
        request = LEAVE if self._stops.leaving.is_set() else STOP
        asked = request if self._stops.stop.is_set() else ""
        report = {**report_of(ranks, asked=asked, answers=answers), **ranks.report(self._round.message_of(LEADER))}
        self._round.publish({**report, **self._verifier.message})

    def _heal(self, ranks: RankGroup, nonce: str) -> None:
        for event in ranks.heal():
            self._publish(event)
        for rejoined in ranks.find_rejoined():
            self._recorder.record_rejoined(rejoined, nonce, self._publish)

    def _resume(self) -> None:
        """Hand the resume point to this node's ranks once the leader has announced it, and its state in memory is here."""
        if self._point is None:
            self._verifier.poll()
            announced = self._round.announced(RESUME)
            if announced is None:
                return
            self._verifier.close()
            self._point = point = resume_point_of(announced)
            self._attempt = point.attempt
            self._part.fetch(point)
        self._part.hand_over()

    def _report_lost_leader(self, ranks: RankGroup) -> AttemptVerdict:
        """Report that the leader is lost. The next leader reads the progress from the ledger."""
        known = [found for found in ranks.heartbeats() if found is not None]
        cut_off, leader = self._round.cut_off, self._round.hosts[LEADER]
        reason = "lost the rendezvous" if cut_off else f"lost node {leader}, which led"
        step = max((found.step for found in known), default=0)
        end = planned_end(f"attempt {self._attempt} {reason}", step=step, undone=known)
        failed_at = end.failed_at if cut_off else end.failed_at - self._round.silent_s(LEADER)
        mesh, world_size = self._part.spec.launch.mesh, self._round.share.world_size
        rows = rows_of_readers(known, world_size=world_size, mesh=mesh)
        failure = replace(end, failed_at=failed_at, rows=rows)
        self._publish({"event": "failure", "cause": failure.cause, "step": failure.last_step, "phase": failure.doing})
        return AttemptVerdict(restart=failure, attempt=self._attempt)

    def _publish(self, event: Event) -> None:
        self._publish_here({"attempt": self._attempt, **event})
