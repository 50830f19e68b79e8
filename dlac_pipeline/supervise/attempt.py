"""Attempt of a run under its supervisor: from spawning the ranks and claiming the run to the end of the last process."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.elastic.round import RESUME
from dlac_pipeline.lakehouse.errors import LeftUnfinished
from dlac_pipeline.lakehouse.ledger.older_ledger import LedgerWatch
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.supervise.attempt_monitor import AttemptMonitor
from dlac_pipeline.supervise.attempt_state import AttemptMachine, AttemptState, Decision, Observation
from dlac_pipeline.supervise.failure import (
    SILENT_KINDS,
    STOPPED_FILE,
    STUCK,
    Failure,
    end_ranks,
    first_cause,
    planned_end,
    stuck_rank,
)
from dlac_pipeline.supervise.ranks.all_ranks import AllRanks
from dlac_pipeline.supervise.ranks.local_ranks import Exit
from dlac_pipeline.supervise.ranks.node_part import NodePart
from dlac_pipeline.supervise.ranks.rank_events import Ending, Event, EventReader, ending_of, read_entered_leg
from dlac_pipeline.supervise.ranks.run_events import RunEvents
from dlac_pipeline.supervise.recovery_recorder import BackgroundRecorder
from dlac_pipeline.supervise.start.supervised_start import SupervisedStart
from dlac_pipeline.supervise.supervision import Supervision

POLL_S = 0.05
_LEAVE_MARGIN_S = 2.0
"""Extra seconds for ranks past their deadline. Ranks enforce the deadline themselves and report the lost steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescale:
    """The planned end of an attempt after a checkpoint, so that other nodes can train the next one."""

    cause: Failure


class _StopRequested(Exception):
    """A stop request during the verification of the checkpoint. Nothing was trained, and nothing is lost."""


class SupervisedAttempt:
    """An attempt that this node leads."""

    def __init__(
        self,
        part: NodePart,
        start: SupervisedStart,
        supervision: Supervision,
        *,
        recorder: BackgroundRecorder,
        events: RunEvents,
    ) -> None:
        self.number = 0
        self._leg: Leg | None = None
        self.committed = False
        self.others = part.round.others
        """Places of the further nodes of this attempt."""
        self.folder = part.folder
        self._part = part
        self._start = start
        self._plans = supervision.plans
        self._retry = supervision.retrying(replaces=start.request.replaces)
        self._stops = supervision.stops
        self._recorder = recorder
        self._run_events = events
        self._round = part.round
        self._spec = part.spec
        self._machine = AttemptMachine(has_others=bool(self.others))
        self._monitor = AttemptMonitor(recorder, self._spec.launch, self._publish)
        self._events = EventReader(self.folder)
        self._verified = (0, -1)
        self._drains_since = 0.0
        self._ending: Ending | None = None
        """The ending that rank 0 has reported."""
        self._head_step = self._resumed_step = 0

    @property
    def step(self) -> int:
        """Last step that all ranks have finished."""
        return self._monitor.step

    def run(self) -> Ending | Failure | Rescale:
        """Run the whole attempt. No rank of this node is left when the call returns or raises."""
        own = self._part.start()
        ranks = self._part.all_ranks(own)
        end: Ending | Failure | Rescale
        try:  # the ranks import their libraries while the run is claimed
            try:
                point = self._start.claim(self._report_verification)
            except _StopRequested:
                end = self.end_before_training()
            else:
                failure = self._start.find_failure(point)
                if failure is not None:
                    self._recorder.begin(point, failure)
                self._resume(point)
                self._publish({"event": "attempt", "step": point.step, "pids": self._wait_for_start(ranks)})
                with closing(LedgerWatch(self._plans.lakehouse)) as ledger:
                    end = self._watch(ranks, ledger)
        finally:
            try:
                self._part.end(own)
            finally:
                self._forward_events()
                self._recorder.end_attempt()
        if end == "stopped":
            with suppress(OSError):  # the next launch then counts a failure
                (self.folder / STOPPED_FILE).touch()
        return end

    @property
    def leg(self) -> Leg | None:
        """The leg that is trained, or None before the resume point is known. Ranks may have entered another one in place."""
        entered = read_entered_leg(self.folder)
        return self._leg if entered is None else Leg.from_json(entered)

    def end_before_training(self) -> Ending | Rescale:
        """Return the end of an attempt that a stop request ended before its ranks trained: other nodes resume the run."""
        if self._stops.leaving.is_set() and self.others:
            return Rescale(cause=planned_end(_leaving(), step=self.step, undone=[]))
        return "stopped"

    def _resume(self, point: ResumePoint) -> None:
        """Announce the resume point to all nodes, and hand it to this node's ranks or begin to fetch its state in memory."""
        self.number = point.attempt
        self._monitor.step = self._resumed_step = point.step
        self._head_step = point.head_step
        self._leg = leg = Leg.from_json(point.leg)
        rows = [self._retry(self._plans.row, source.plan_id) for source in leg.sources]
        self._run_events.publish_start(point, self._plans, self._round.share, self.folder)
        readers = self._spec.launch.mesh.readers(self._round.share.world_size)
        for message in leg.warnings(sum(row.live_rows for row in rows), readers):
            self._publish({"event": "warning", "message": message})
        if isinstance(point, FromMemory) and point.head_damage:
            facts = f"expected the checkpoint {point.checkpoint_id!r} to be whole, found damage: {point.head_damage}"
            self._publish(
                {
                    "event": "warning",
                    "message": f"{facts}; the run resumes from memory, and the next checkpoint quarantines it",
                }
            )
        self._round.announce(RESUME, json.loads(point.to_json()))
        self._part.fetch(point)

    def _wait(self) -> None:
        self._part.hand_over()
        time.sleep(POLL_S if self._part.has_point else POLL_S / 10)

    def _report_verification(self, step: int, done: int, total: int) -> None:
        if self._stops.stop.is_set():
            raise _StopRequested
        if (step, done) == self._verified:
            return
        self._monitor.step, self._verified = step, (step, done)
        self._publish({"event": "verifying", "step": step, "bytes": done, "of": total})

    def _wait_for_start(self, ranks: AllRanks) -> list[int]:
        """Wait until this node's ranks have started and return their process ids. Pass on a stop request in between."""
        while not ranks.own.processes.is_started:
            if ranks.stop_requested or self._stops.stop.is_set():
                self._stops.stop.set()
                self._apply(Observation.STOP_REQUESTED, ranks)
            self._wait()
        return ranks.own.processes.pids

    def _watch(self, ranks: AllRanks, ledger: LedgerWatch) -> Ending | Failure | Rescale:
        while True:
            self._read_ranks(ranks)
            for event in ranks.own.heal():
                self._publish(event)
            for rejoined in ranks.own.find_rejoined():
                self._recorder.record_rejoined(rejoined, self._start.request.nonce, self._publish)
            ledger.check()
            for observation, cause in self._observe(ranks):
                end = self._apply(observation, ranks, cause)
                if end is not None:
                    return end
            self._wait()

    def _observe(self, ranks: AllRanks) -> Iterator[tuple[Observation, Exit | None]]:
        """Yield the present observations, with the rank to blame. An exit comes before messages that no rank can receive."""
        if ranks.stop_requested:  # another node was asked to stop the run
            self._stops.stop.set()
        if ranks.own.has_notice:
            yield Observation.NOTICE_RECEIVED, None
        exited = ranks.all_exited()  # read first: a rank that dies between the two reads has failed
        failures = ranks.failures()
        if failures and self._was_terminated(ranks, failures):
            yield Observation.RANKS_TERMINATED, None
        elif failures:
            yield Observation.RANKS_FAILED, first_cause(failures)
        if exited:
            self._read_ranks(ranks)
            yield Observation.RANKS_EXITED, None
        if self._stops.stop.is_set():
            yield Observation.STOP_REQUESTED, None
        if self._round.could_grow:
            yield Observation.ROOM_TO_GROW, None
        if self._ending == "stopped":
            yield Observation.TRAINING_STOPPED, None
        hung = self._monitor.hangs.find_hang(ranks.heartbeats(), gone=ranks.own.gone())
        if hung is not None and ranks.own.outlives_hang(hung):
            self._monitor.hangs.forget()
        elif hung is not None:
            yield Observation.HANG_FOUND, hung
        drained_s = time.monotonic() - self._drains_since  # the wall clock may be set during the attempt
        if self._machine.state is AttemptState.DRAINING and drained_s > self._spec.launch.deadline_s + _LEAVE_MARGIN_S:
            yield Observation.DEADLINE_PASSED, stuck_rank(ranks, drained_s)

    def _apply(
        self, observation: Observation, ranks: AllRanks, cause: Exit | None = None
    ) -> Ending | Failure | Rescale | None:
        """Act on an observation. Return the end of the attempt once it has ended."""
        decision = self._machine.observe(observation)
        if decision is Decision.LEAVE:
            self._stops.leave()
        elif decision is Decision.REQUEST_STOP:
            self._drains_since = time.monotonic()
            ranks.own.request_stop()
        elif decision is Decision.REQUEST_CHECKPOINT and ranks.own.request_checkpoint():
            self._machine.observe(Observation.CHECKPOINT_REQUESTED)
        elif decision is Decision.START_DEADLINE:
            self._drains_since = time.monotonic()
        elif decision is Decision.FAIL:
            assert cause is not None, "a failure has a cause"
            return self._fail(ranks, cause)
        elif decision is Decision.END_AS_STOPPED:
            return self._conclude(ranks, "stopped")
        elif decision is Decision.END_AS_REPORTED:
            return self._conclude(ranks, self._ending or "stopped")
        elif decision is Decision.END_UNASKED:
            return self._conclude(ranks, self._reported_ending(ranks))
        return None

    def _was_terminated(self, ranks: AllRanks, failures: list[Exit]) -> bool:
        """Return True if a rank died of the signal that asked it to exit, before it could handle the signal."""
        is_draining = self._machine.state is AttemptState.DRAINING
        requested = is_draining or self._stops.stop.is_set() or bool(ranks.leaving_nodes)
        return requested and any(failure.code == -signal.SIGTERM for failure in failures)

    def _conclude(self, ranks: AllRanks, ending: Ending) -> Ending | Rescale:
        """Return the end of the attempt: other nodes resume it if nodes come or go and the run was not stopped."""
        stops, rescales = self._stops, self._machine.rescales
        if rescales and ranks.own.has_notice:  # a termination notice arrived after the request for a checkpoint
            stops.leave()
        if ending != "stopped":
            return ending
        if stops.leaving.is_set() and self.others:
            return self._rescale(ranks, _leaving())
        if stops.stop.is_set() or not (rescales or ranks.leaving_nodes):
            return ending
        cause = "more nodes have come" if rescales else f"leaving: node {', '.join(ranks.leaving_nodes)}"
        self._publish({"event": "rescale", "cause": cause, "step": self.step})
        return self._rescale(ranks, cause)

    def _rescale(self, ranks: AllRanks, cause: str) -> Rescale:
        undone = ranks.heartbeats() if self.step > self._head_step else []
        return Rescale(cause=planned_end(cause, step=self.step, undone=[each for each in undone if each is not None]))

    def _reported_ending(self, ranks: AllRanks) -> Ending:
        """Return the ending that rank 0 reported. Raise `LeftUnfinished` without one."""
        if self._ending is not None:
            return self._ending
        suppressed = "".join(f", of {each.kind}: {each.message}" for each in ranks.own.suppressed_errors()[:1])
        raise LeftUnfinished(
            f"expected the script of run {self._spec.run!r} to train to the end of run.batches(), or to leave `with "
            f"training_run()` between two steps; found that it ended with exit status 0 at step {self.step}{suppressed}: "
            "the committed checkpoints are kept; fix the script, and start it again"
        )

    def _fail(self, ranks: AllRanks, cause: Exit) -> Failure:
        mesh = self._spec.launch.mesh
        if cause.kind not in (STUCK, *SILENT_KINDS):  # else no connection breaks, which survivors would notice
            self._part.await_last_step(ranks.own)
        failure = end_ranks(ranks, cause, step=self.step, resumed_step=self._resumed_step, mesh=mesh)
        facts = {"cause": failure.cause, "step": failure.last_step, "phase": failure.doing, **ranks.log_end(cause.rank)}
        raised_at = {"where": failure.where, "traceback": failure.traceback} if failure.place else {}
        self._publish({"event": "failure", "rank": cause.rank, **facts, **raised_at})
        self._recorder.end("failed again", self._publish)  # of the previous failure
        return failure

    def _read_ranks(self, ranks: AllRanks) -> None:
        self._forward_events()
        self._monitor.observe(ranks.heartbeats())

    def _forward_events(self) -> None:
        """Publish the events of rank 0, of written recoveries, and warnings about memory states. Note the attempt's events."""
        self._recorder.publish_written()
        for message in self._part.memory.take_warnings():
            self._publish({"event": "warning", "message": message})
        for event in self._events.read_new():
            if event["event"] == "training":
                self._machine.observe(Observation.TRAINING_BEGAN)
            if event["event"] == "checkpoint":
                self.committed, self._head_step = True, event["step"]
            if ending := ending_of(event):
                self._ending = ending
                self._monitor.step = max(self.step, event["step"])  # a dead process group may not have got there
            self._publish(event)

    def _publish(self, event: Event) -> None:
        self._run_events.publish({"attempt": self.number, **event})


def _leaving() -> str:
    return f"leaving: node {socket.gethostname()}"
