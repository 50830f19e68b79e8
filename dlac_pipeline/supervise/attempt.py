"""One launch of a run under its supervisor: from spawning the ranks and claiming the run to the end of the last process.

In: a job spec, and the failure before. Out: events, the end of the attempt, and a row in `recoveries` if it recovered.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tenacity

from dlac_pipeline.checkpoint.files import make_below
from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.elastic.ranks.launch_folder import room_file
from dlac_pipeline.elastic.round import RESUME, Round
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, DlacError, LeftUnfinished
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import LedgerWatch
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.all_ranks import AllRanks
from dlac_pipeline.supervise.choose_leg import ResumeOptions
from dlac_pipeline.supervise.claim import ClaimRequest, ResumePoint, claim_and_verify, new_nonce
from dlac_pipeline.supervise.distributed_verify import NodeVerifiers
from dlac_pipeline.supervise.incident import (
    Failure,
    Incident,
    RecoveryOutcome,
    ended_on_purpose,
    failure_of_attempt,
)
from dlac_pipeline.supervise.liveness.progress import Phase, Progress
from dlac_pipeline.supervise.local_ranks import Exit, RankGroup
from dlac_pipeline.supervise.policies.hangs import HangDetector, first_cause, stuck_rank
from dlac_pipeline.supervise.policies.stragglers import Stragglers
from dlac_pipeline.supervise.retry_policy import patience_s, waiting_for
from dlac_pipeline.supervise.start_ranks import RankStarter

Event = dict[str, Any]
Ending = Literal["finished", "caught_up", "stopped", "left"]
POLL_S = 0.05
_STEP_EVENT_EVERY_S = 0.5
KEEP_LAUNCHES = 50
"""Attempts of a run whose launch folders are kept, with logs and the job specs for rehearsals. Nodes may share a folder."""
_FORGET_AT_ONCE = 5
_LEAVE_MARGIN_S = 2.0
"""Extra seconds for ranks past their deadline. Ranks enforce the deadline themselves and report what was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """Facts that all attempts of one supervisor share."""

    spec: JobSpec
    lakehouse: Lakehouse
    plans: Plans
    """Plans that this process has read."""
    starter: RankStarter
    """Starter of the ranks."""
    on_event: Callable[[Event], None]
    stop: threading.Event
    """Set when the run was asked to stop, or this node to leave it."""
    leaves: threading.Event
    """Set when only this node was asked to leave."""
    noticed_by: str
    """Observer of the failure of the attempt that the first one replaces."""
    noticed_at: float
    """Moment at which that failure was noticed, in seconds since the epoch."""
    launched_at: float
    """Start of this supervisor, in seconds since the epoch."""
    launched_by: str
    """Run of the orchestrator that started this supervisor, or empty."""

    def leave(self) -> None:
        """Ask this node to leave the run to the other nodes."""
        self.leaves.set()
        self.stop.set()

    def waiting(self, *, replaces: int | None) -> tenacity.Retrying:
        """Return retries for calls that need the catalog. A recovery waits for an unavailable catalog until it is stopped."""
        within_s = patience_s(replaces=replaces, noticed_by=self.noticed_by)
        return waiting_for(CatalogUnreachable, within_s=within_s, stop=self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescale:
    """The reason to end an attempt after a checkpoint, so that other nodes can train the next one."""

    why: Failure


class _ToldToStop(Exception):
    """A stop request during the verification of the checkpoint. Nothing was trained, and nothing is lost."""


class SupervisedAttempt:
    """One attempt that this node leads. `replaces` and `failure` describe the attempt before it."""

    def __init__(
        self,
        supervision: Supervision,
        round_: Round,
        *,
        options: ResumeOptions,
        replaces: int | None,
        failure: Failure | None,
    ) -> None:
        self._supervision = supervision
        self._round = round_
        self._spec = spec_for(supervision.spec, round_)
        self._lakehouse = supervision.lakehouse
        self._options = options
        self._replaces = replaces
        self._failure = failure
        self._nonce = new_nonce()
        self._folder = Path(self._spec.checkpoint.local) / self._spec.run / f"launch-{self._nonce}"
        self._stragglers = Stragglers(self._spec.launch)
        self._events_read = 0
        self._incident: Incident | None = None
        self._verified = (0, -1)
        self._said_step, self._said_step_at = (0, 0), -math.inf
        self._started_at = time.time()
        self.number = 0
        self.leg: Leg | None = None
        self.step = 0
        self.committed = False
        self._trains = False
        self._asked_at: float | None = None
        self._ending: Ending | None = None
        self._head_step = self._resumed_step = 0
        self._undone: list[Progress] = []

    @property
    def others(self) -> list[int]:
        """Places of the other nodes of this attempt."""
        return self._round.others

    @property
    def folder(self) -> Path:
        """The launch folder."""
        return self._folder

    def run(self) -> Ending | Failure | Rescale:
        """Run the whole attempt. No rank of this node is left when the call returns or raises."""
        ranks = AllRanks(
            start_local_ranks(self._spec, self._folder, self._round, self._supervision.starter), self._round
        )
        try:  # the ranks import their libraries while the run is claimed
            try:
                point = self._take_over()
            except _ToldToStop:
                return "stopped"
            self.number, self.step, self._head_step = point.attempt, point.step, point.step
            self._resumed_step = point.step
            self.leg = leg = Leg.from_json(point.leg)
            plans = self._supervision.plans
            live_rows = sum(self._waiting()(plans.row, source.plan_id).live_rows for source in leg.sources)
            for message in leg.warnings(live_rows, self._spec.launch.world_size):
                self._say({"event": "warning", "message": message})
            with storing(self._folder):
                write_durably(self._folder / "resume.json", point.to_json().encode())
            self._round.announce(RESUME, json.loads(point.to_json()))
            self._say({"event": "attempt", "attempt": point.attempt, "step": point.step, "pids": self._pids(ranks)})
            with closing(LedgerWatch(self._lakehouse)) as ledger:
                return self._watch(ranks, ledger)
        finally:
            ranks.end()
            self._forward_events()

    def _verifying(self, step: int, done: int, total: int) -> None:
        if self._supervision.stop.is_set():
            raise _ToldToStop
        if (step, done) == self._verified:
            return
        self.step, self._verified = step, (step, done)
        self._say({"event": "verifying", "step": step, "bytes": done, "of": total})

    def _waiting(self) -> tenacity.Retrying:
        return self._supervision.waiting(replaces=self._replaces)

    def _pids(self, ranks: AllRanks) -> list[int]:
        """Wait until this node's ranks have started and return their process ids. Pass on a stop request in between."""
        while not ranks.is_started:
            if ranks.asked_to_stop:
                self._supervision.stop.set()
            if self._supervision.stop.is_set() and self._asked_at is None:
                self._asked_at = time.monotonic()
                ranks.ask_to_stop()
            time.sleep(POLL_S)
        return ranks.pids

    def _take_over(self) -> ResumePoint:
        current = None
        # Fixed before the first try, so that a launch that claims between two tries is not fenced off.
        if self._replaces is None:
            current = self._waiting()(Ledger(self._lakehouse).state, self._spec.run).fence.attempt
        request = ClaimRequest(
            nonce=self._nonce,
            replaces=self._replaces,
            current=current,
            options=self._options,
            launch_folder=str(self._folder),
            launched_by=self._supervision.launched_by,
        )
        point: ResumePoint = self._waiting()(
            claim_and_verify,
            self._supervision.plans,
            self._spec,
            request,
            verifying=self._verifying,
            verify=NodeVerifiers(self._round, least_bytes=self._spec.launch.verify_together_mb * 2**20).verify,
            stop=self._supervision.stop,
            on_claim=self._supervision.starter.import_agent,
        )
        failure = self._failure
        if failure is None and point.replaces > 0:
            rows = self._waiting()(Ledger(self._lakehouse).rows, self._spec.run, kinds=("claim", "checkpoint"))
            failure = failure_of_attempt(
                rows,
                point.replaces,
                noticed_by=self._supervision.noticed_by,
                noticed_at=self._supervision.noticed_at,
                launched_at=self._supervision.launched_at,
                stopped_at=self._started_at,
            )
        if failure is not None:
            self._incident = Incident(self._spec, point, failure)
        return point

    def _watch(self, ranks: AllRanks, ledger: LedgerWatch) -> Ending | Failure | Rescale:
        grows = False
        silence = HangDetector(self._spec.launch)
        while True:
            self._forward_events()
            self._follow_progress(ranks)
            ledger.check()
            asked_at = self._asked_at
            if ranks.asked_to_stop:
                self._supervision.stop.set()
            if (self.others or grows) and asked_at is None and ranks.noticed:
                self._supervision.leave()
            exited = ranks.all_exited()  # asked first: a rank that dies between the two questions is a failure
            failures = ranks.failures()
            told = asked_at is not None or self._supervision.stop.is_set() or ranks.leaving
            if told and any(failure.code == -signal.SIGTERM for failure in failures):
                self._ending = "stopped"  # the signal came before the rank could handle it: nothing is lost
                return self._judge_ending(ranks, grows=grows)
            if failures:
                return self._failed(ranks, first_cause(failures))
            if exited:
                self._forward_events()
                self._follow_progress(ranks)
                return self._judge_ending(ranks, grows=grows)
            now = time.monotonic()  # the wall clock may be set during the attempt
            grows = grows or (self._round.could_grow and asked_at is None and self._trains and self._made_room())
            if self._supervision.stop.is_set() and asked_at is None:
                self._asked_at = asked_at = now
                ranks.ask_to_stop()
            elif grows and asked_at is None and self._ending == "stopped":
                self._asked_at = now  # all is committed: from now on the script has the usual time to exit
            hung = silence.too_long(ranks)
            if hung is not None:
                return self._failed(ranks, hung)
            if asked_at is not None and now > asked_at + self._spec.launch.leave_s + _LEAVE_MARGIN_S:
                return self._failed(ranks, stuck_rank(ranks, now - asked_at))
            time.sleep(POLL_S)

    def _made_room(self) -> bool:
        """Ask the ranks to exit after a checkpoint, without a deadline. Return True if the request was written."""
        try:
            room_file(self._folder).touch()
        except OSError:  # the disk may be full for a moment
            return False
        return True

    def _judge_ending(self, ranks: AllRanks, *, grows: bool) -> Ending | Rescale:
        """Return the end of the attempt.

        If nodes come or go and the run was not stopped, it resumes with the nodes that exist.

        Raises:
            LeftUnfinished: no rank reported an end, and the ranks were not asked to exit.
        """
        if self._ending is None and self._asked_at is None and not grows:
            kept = "".join(f", of {each.kind}: {each.message}" for each in ranks.kept_errors()[:1])
            raise LeftUnfinished(
                f"expected the script of run {self._spec.run!r} to train to the end of run.batches(), or to leave `with "
                f"training_run()` between two steps; found that it ended with exit status 0 at step {self.step}{kept}: "
                "the committed checkpoints are kept; mend the script, and start it again"
            )
        self._ending = self._ending or "stopped"
        if grows and ranks.noticed:  # a termination notice arrived while room was made
            self._supervision.leave()
        if self.step > self._head_step:
            self._undone = [found for found in ranks.progress() if found is not None]
        if self._ending != "stopped" or self._supervision.stop.is_set() or not (grows or ranks.leaving):
            return self._ending
        cause = "more nodes have come" if grows else f"leaving: node {', '.join(ranks.leaving)}"
        self._say({"event": "regather", "cause": cause, "step": self.step})
        return Rescale(why=self.ended_for(cause))

    def ended_for(self, cause: str) -> Failure:
        """Return the failure that stands for an intended end, with the steps that it had no time to commit."""
        return ended_on_purpose(cause, step=self.step, undone=self._undone)

    def _failed(self, ranks: AllRanks, cause: Exit) -> Failure:
        noticed_at = time.time()
        progress = [found for found in ranks.progress() if found is not None]
        last_step = max((found.step for found in progress), default=self.step)
        mine = ranks.progress()[cause.rank]
        ranks.end()
        words = ranks.last_words(cause.rank)
        raised = cause.code >= 0  # a rank that a signal killed may have recorded an exception that its script caught
        failure = Failure(
            cause=str(cause),
            kind=cause.kind,
            message=cause.message,
            detail=cause.detail,
            noticed_by="supervisor",
            failed_at=ranks.started_at if mine is None else mine.at,
            noticed_at=noticed_at,
            launched_at=noticed_at,
            stopped_at=time.time(),
            last_step=last_step,
            began=min((found.spent.began for found in progress), default=0.0),
            rows=sum(found.spent.rows for found in progress),
            in_hand=0 if mine is None else max(0, mine.spent.in_hand),
            doing=Phase.STARTING.name.lower() if mine is None else mine.doing,
            rank=cause.rank,
            trained=mine is not None and mine.step > self._resumed_step,
            where=cause.where if raised else "",
            place=cause.place if raised else "",
            origin=cause.origin if raised else "",
            traceback=cause.traceback if raised else "",
            log=words.get("log", ""),
        )
        told = {"cause": failure.cause, "step": last_step, "phase": failure.doing, **words}
        raised_at = {"where": failure.where, "traceback": failure.traceback} if failure.place else {}
        self._say({"event": "failure", "rank": cause.rank, **told, **raised_at})
        if self._incident is not None:  # the recovery from the previous failure has failed
            self._report(self._incident, "failed again")
            self._incident = None
        return failure

    def _follow_progress(self, ranks: AllRanks) -> None:
        progress = ranks.progress()
        if any(found is None for found in progress):
            return
        known = [found for found in progress if found is not None]
        self.step = max(self.step, min(found.step for found in known))
        if self._incident is not None and self._incident.observe(known):
            self._report(self._incident, "resumed")
            self._incident = None
        for straggler in self._stragglers.observe(known):
            self._say(straggler.event())
        first = known[0]
        news = first.loss_step and (first.step, first.loss_step) != self._said_step
        if news and time.monotonic() - self._said_step_at >= _STEP_EVENT_EVERY_S:
            self._said_step, self._said_step_at = (first.step, first.loss_step), time.monotonic()
            self._say({"event": "step", "step": first.step, "loss_step": first.loss_step, "loss": first.loss})

    def _report(self, incident: Incident, outcome: RecoveryOutcome) -> None:
        """Write the recovery to the ledger. An error of the report does not end the run."""
        try:
            self._say(incident.report(self._lakehouse, outcome))
        except DlacError as err:
            self._say({"event": "warning", "message": f"the recovery could not be recorded: {err}"})

    def _forward_events(self) -> None:
        for event in self._new_events():
            if event["event"] == "checkpoint":
                self.committed, self._head_step = True, event["step"]
            if event["event"] in ("finished", "stopped", "caught_up", "left"):
                self._ending = event["event"]
            self._trains = self._trains or event["event"] == "training"
            self._say(event)

    def _new_events(self) -> Iterator[Event]:
        path = self._folder / "events.jsonl"
        if path.exists():
            with path.open() as stream:
                stream.seek(self._events_read)
                for line in stream:
                    if not line.endswith("\n"):
                        break
                    self._events_read += len(line.encode())
                    yield json.loads(line)

    def _say(self, event: Event) -> None:
        self._supervision.on_event({"run": self._spec.run, "attempt": self.number, **event})


def spec_for(spec: JobSpec, round_: Round) -> JobSpec:
    """Return the job spec with the number of ranks that the nodes of an attempt have."""
    launch = spec.launch.model_copy(update={"world_size": round_.share.world_size})
    return spec.model_copy(update={"launch": launch})


def start_local_ranks(spec: JobSpec, folder: Path, round_: Round, starter: RankStarter) -> RankGroup:
    """Start this node's ranks with a new launch folder.

    Raises:
        StoreUnavailable: the folder cannot be made, or the run's folder is gone with its mount.
    """
    with storing(folder):
        make_below(folder.parent, folder)
        path = folder / "spec.json"
        path.touch(mode=0o600)  # the spec may contain credentials
        path.write_text(spec.model_dump_json())
    forget_launches(folder.parent, keep=KEEP_LAUNCHES * round_.share.nodes)
    return starter.start(spec, folder, round_.share)


def forget_launches(folder: Path, *, keep: int) -> None:
    """Remove the oldest launch folders of a run beyond `keep`. Remove only a few per call, because a launch waits for it."""
    with suppress(FileNotFoundError):  # another node that shares the folder was faster
        oldest_last = sorted(folder.glob("launch-*/"), key=lambda each: each.stat().st_mtime, reverse=True)
        for each in oldest_last[keep:][-_FORGET_AT_ONCE:]:
            shutil.rmtree(each, ignore_errors=True)
