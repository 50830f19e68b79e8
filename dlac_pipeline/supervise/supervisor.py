"""Supervisor of a node's ranks: it launches an attempt, watches it, ends all its ranks when one dies, and recovers.

In: a job spec. Out: events for listeners, a row in `recoveries` per recovery, and the end of the run.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.elastic.membership import EndedElsewhere, Membership
from dlac_pipeline.elastic.ranks.processes import HANG
from dlac_pipeline.elastic.round import VERDICT, Round
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.errors import (
    CatalogUnreachable,
    CommitOutcomeUnknown,
    DlacError,
    LakehouseError,
    NodesMissing,
    RunBusy,
    RunFinished,
    SpecInvalid,
    SteppedAside,
    StoreUnavailable,
    TrainingFailed,
)
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import HEAD_KINDS
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.all_ranks import LOST
from dlac_pipeline.supervise.attempt import (
    Ending,
    Event,
    Rescale,
    SupervisedAttempt,
    Supervision,
)
from dlac_pipeline.supervise.choose_leg import ResumeOptions
from dlac_pipeline.supervise.claim import check_current, check_unfinished
from dlac_pipeline.supervise.claims import rendezvous_of, to_replace
from dlac_pipeline.supervise.follower_attempt import AttemptVerdict, FollowerAttempt
from dlac_pipeline.supervise.incident import Failure, ended_on_purpose
from dlac_pipeline.supervise.liveness.other_node import refuse_if_alive_elsewhere
from dlac_pipeline.supervise.policies.restart import RestartPolicy
from dlac_pipeline.supervise.retry_policy import patience_s, waiting_for
from dlac_pipeline.supervise.run_lock import run_lock
from dlac_pipeline.supervise.start_ranks import RankStarter

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a supervised run."""

    ending: Ending
    """One of: finished, caught up (no appended rows are left), stopped (on request, after a checkpoint), left (the script
    returned early).
    """
    attempts: int
    """Attempts that this supervisor launched."""
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """State of a supervisor after the catalog and the store have answered."""

    supervision: Supervision
    membership: Membership
    judge: RestartPolicy

    @property
    def lakehouse(self) -> Lakehouse:
        """Lakehouse of the run."""
        return self.supervision.lakehouse


class Supervisor:
    """Supervisor of a job: it runs the job to its end, in as many attempts as needed. With several nodes, one runs on each."""

    def __init__(
        self,
        request: Request,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        starter: RankStarter | None = None,
    ) -> None:
        """Prepare to run the job of `request`.

        `replaces` names the failed attempt of a recovery, `noticed_by` its observer, and `recovers` the orchestrator's ended
        run that is resumed. A late claim of that run is replaced too.
        """
        noticed_at = request.noticed_at
        self._launched_at = time.time()
        self._noticed_at = self._launched_at if noticed_at is None else min(noticed_at, self._launched_at)
        self._launched_by = request.launched_by
        self._starter = starter or RankStarter()
        self._spec = request.spec
        self._on_event = on_event
        self._plan_ids = request.plan_ids
        self._options = ResumeOptions(repin=request.repin)
        self._takeover = request.takeover
        self._wait_s = request.wait_s
        self._noticed_by = request.noticed_by
        self._stop = threading.Event()
        self._leaves = threading.Event()
        self._replaces = request.replaces
        self._recovers = request.recovers
        self._failure: Failure | None = None
        self._attempts, self._step = 0, 0
        self._lock = ExitStack()
        self._holds_lock, self._was_led = False, False

    def stop(self) -> None:
        """Request a checkpoint and exit within the grace period. Call it from any thread, but not from a signal handler."""
        self._stop.set()

    def leave(self) -> None:
        """Ask this node to exit. The run continues without it if enough other nodes exist."""
        self._leaves.set()
        self._stop.set()

    def run(self) -> Outcome:
        """Launch attempts, watch them, and recover, until the run ends.

        Raises:
            SpecInvalid: the training script does not exist.
            RunBusy: another launch is alive, and `takeover` was not requested.
            NodesMissing: fewer nodes came than the job spec requires.
            NoProgress: several attempts in a row committed nothing.
            ScriptFailed: the script raised the same exception at the same place twice in a row.
            DlacError: a rank failed with an error that another attempt would meet again.
        """
        spec = self._spec
        if not Path(spec.launch.script).is_file():
            raise SpecInvalid(
                f"expected a training script at launch.script = {spec.launch.script!r}, found no such file"
            )
        try:
            with closing(self._starter):
                self._starter.begin(spec)
                return self._run()
        except (CatalogUnreachable, StoreUnavailable, RunBusy):
            if not self._stop.is_set() or self._attempts:
                raise
            return self._outcome("stopped")  # the stop came while it waited for the catalog, the store or the lock

    def _run(self) -> Outcome:
        spec = self._spec
        self._patiently(tiers_of(spec).check_writable)
        lakehouse = self._patiently(connect, spec.lakehouse)
        ledger = self._patiently(lambda: Ledger(lakehouse).table_uuid)
        with closing(Membership.of_job(spec, ledger=ledger)) as membership, self._lock:
            supervision = Supervision(
                spec=spec,
                lakehouse=lakehouse,
                plans=Plans(lakehouse),
                starter=self._starter,
                on_event=self._on_event,
                stop=self._stop,
                leaves=self._leaves,
                noticed_by=self._noticed_by,
                noticed_at=self._noticed_at,
                launched_at=self._launched_at,
                launched_by=self._launched_by,
            )
            launch = _Launch(supervision=supervision, membership=membership, judge=RestartPolicy(supervision))
            while True:
                try:
                    round_ = self._next_round(launch)
                except RunFinished as err:
                    return self._conclude(self._finished_before(lakehouse, err))
                except EndedElsewhere as ended:
                    return self._conclude(AttemptVerdict.of(ended.message))
                if round_ is None:
                    return self._outcome("stopped")
                with round_:
                    verdict = self._lead(launch, round_) if round_.leads else self._be_led(supervision, round_)
                    if verdict.again is None or self._stop.is_set():
                        round_.part()
                        return self._conclude(verdict)
                    if round_.cut_off:
                        membership.forget()

    def _conclude(self, verdict: AttemptVerdict) -> Outcome:
        """Return the run's end for this node, or raise its error."""
        self._step = verdict.step or self._step
        if verdict.error is not None:
            kind, message = verdict.error
            raise errors.error_from_kind(kind, message, default=TrainingFailed)
        return self._outcome(verdict.ending or "stopped")

    def _outcome(self, ending: Ending) -> Outcome:
        return Outcome(ending=ending, attempts=self._attempts, step=self._step)

    def _next_round(self, launch: _Launch) -> Round | None:
        """Return the round of the next attempt, or None if a stop was requested.

        Raises:
            NodesMissing: too few nodes came.
            RunFinished, EndedElsewhere: the run has ended without this node.
        """
        try:
            return launch.membership.next_round(
                self._replaces or 0, self._stop, lambda: self._check_unfinished(launch.lakehouse)
            )
        except NodesMissing:
            if self._failure is not None and self._replaces is not None and self._holds_lock:
                launch.judge.record_gave_up(self._failure, self._replaces)
            raise

    def _lead(self, launch: _Launch, round_: Round) -> AttemptVerdict:
        """Run an attempt and decide its consequence for all nodes.

        Raises:
            DlacError: the error that ends the run. The other nodes have received it.
        """
        error: DlacError | None = None
        try:
            verdict = self._attempt(launch, round_)
        except DlacError as err:
            if self._others_went_on(launch.lakehouse, round_, err):
                verdict = AttemptVerdict(again=ended_on_purpose(f"other nodes resumed the run: {err}", step=self._step))
            else:
                error, verdict = err, AttemptVerdict(error=(errors.error_kind(err), str(err)), step=self._step)
        self._step = verdict.step
        if verdict.again is None and not self._leaves.is_set():
            launch.membership.end_run(verdict.words())  # before this node exits, because it may serve the rendezvous
        round_.announce(VERDICT, verdict.words())
        round_.acknowledge()
        if error is not None:
            round_.part()
            raise error
        return verdict

    def _be_led(self, supervision: Supervision, round_: Round) -> AttemptVerdict:
        """Run an attempt that another node leads. Return the leader's verdict."""
        self._lock.close()
        self._holds_lock, self._was_led = False, True
        self._attempts += 1
        verdict = FollowerAttempt(supervision, round_, attempt=self._replaces or 0).run()
        self._replaces = verdict.attempt or self._replaces
        self._failure, self._step = verdict.again, verdict.step
        return verdict

    def _others_went_on(self, lakehouse: Lakehouse, round_: Round, err: DlacError) -> bool:
        """Return True if nodes of this rendezvous resumed the run while this leader was cut off. It joins them again."""
        meets = self._spec.launch.rendezvous
        if isinstance(err, CatalogUnreachable):
            return round_.cut_off
        if not meets or not isinstance(err, SteppedAside):
            return False
        ledger = Ledger(lakehouse)
        attempt = self._patiently(ledger.state, self._spec.run).fence.attempt
        return meets == rendezvous_of(self._patiently(ledger.rows, self._spec.run, kinds=("claim",)), attempt)

    def _attempt(self, launch: _Launch, round_: Round) -> AttemptVerdict:
        """Run an attempt, if the run may be claimed."""
        try:
            self._hold_lock(launch.supervision.plans)
        except RunFinished as err:
            return self._finished_before(launch.lakehouse, err)
        if self._was_led:
            launch.judge.follow_others()
            self._was_led = False
        while True:
            attempt = SupervisedAttempt(
                launch.supervision, round_, options=self._options, replaces=self._replaces, failure=self._failure
            )
            self._attempts += 1
            try:
                return self._run_attempt(launch, attempt)
            except SteppedAside:
                before = self._replaces or 0
                late = before if round_.others else self._to_replace(launch.lakehouse, before)
                if late == before:
                    raise
                self._replaces = late
                self._attempts -= 1  # a launch that stepped aside was no attempt

    def _run_attempt(self, launch: _Launch, attempt: SupervisedAttempt) -> AttemptVerdict:
        """Run an attempt, and decide if another one follows.

        Raises:
            NoProgress: no attempt follows, because several in a row committed nothing.
            DlacError: no attempt follows, because it would end in the same way.
        """
        try:
            ending = attempt.run()
        except RunFinished as err:
            return self._finished_before(launch.lakehouse, err)
        except (CatalogUnreachable, CommitOutcomeUnknown):
            if attempt.number or not self._stop.is_set():
                raise
            # the stop came while it waited: nothing was trained
            return AttemptVerdict(ending="stopped", step=self._step)
        if isinstance(ending, str):
            if ending == "stopped" and self._leaves.is_set() and attempt.others:
                left = attempt.ended_for(f"leaving: node {socket.gethostname()}")
                return AttemptVerdict(again=left, attempt=attempt.number, step=attempt.step)
            return AttemptVerdict(ending=ending, attempt=attempt.number, step=attempt.step)
        self._replaces = attempt.number
        if isinstance(ending, Rescale):
            self._failure = ending.why
            launch.judge.went_on(attempt)
        else:
            self._failure = ending
            left_out = launch.judge.left_out_behind(attempt, ending)
            self._options = replace(self._options, unreadable=(*self._options.unreadable, *left_out))
        return AttemptVerdict(again=self._failure, attempt=attempt.number, step=attempt.step)

    def _finished_before(self, lakehouse: Lakehouse, err: RunFinished) -> AttemptVerdict:
        """Return the verdict for a run that was finished before this claim: the failed attempt had committed everything."""
        if self._failure is None:
            raise err
        if self._failure.kind not in ("", HANG, LOST):
            raise TrainingFailed(f"the run is finished, but its script failed afterwards: {self._failure.describe()}")
        end = self._patiently(Ledger(lakehouse).rows, self._spec.run, kinds=("finish",))[-1]
        return AttemptVerdict(ending="finished", attempt=end["attempt"], step=end["step"])

    def _hold_lock(self, plans: Plans) -> None:
        """Refuse or replace another launch of the run. This node keeps the lock until another node leads.

        Where nodes share the local folder, a leader that was cut off may still hold the lock. Followers do not wait for it.
        """
        spec = self._spec
        if self._holds_lock and spec.launch.max_nodes == 1:
            return
        self._replaces = self._checked_target(plans)
        if self._holds_lock:
            return
        if self._replaces is None and not self._was_led:
            rows = partial(self._patiently, Ledger(plans.lakehouse).rows, spec.run, kinds=HEAD_KINDS)
            refuse_if_alive_elsewhere(rows, spec, launched_by=self._launched_by, wait_s=self._wait_s, stop=self._stop)

        def may_replace() -> None:
            self._replaces = self._checked_target(plans)

        lock = run_lock(
            spec.checkpoint.local,
            spec.run,
            wait_s=self._wait_s,
            takeover=self._takeover or self._was_led,
            may_replace=may_replace,
            stop=self._stop,
        )
        self._lock.enter_context(lock)
        self._holds_lock = True

    def _checked_target(self, plans: Plans) -> int | None:
        """Return the attempt to replace, fixed before any wait. So a second launch steps aside, and fences none off."""
        lakehouse = plans.lakehouse
        state = self._patiently(Ledger(lakehouse).state, self._spec.run)
        check_unfinished(state)
        if not self._options.plans:
            requested = tuple(self._patiently(plans.load, plan_id) for plan_id in self._plan_ids)
            self._options = replace(self._options, plans=requested)
        target = state.fence.attempt if self._takeover and self._replaces is None else self._replaces
        if target is not None:
            target = self._to_replace(lakehouse, target, rendezvous=self._spec.launch.rendezvous)
        self._patiently(check_current, lakehouse, self._spec.run, target)
        return target

    def _to_replace(self, lakehouse: Lakehouse, wanted: int, *, rendezvous: str = "") -> int:
        """Return `wanted`, or the current attempt if this launch may replace it."""
        if not rendezvous and not self._recovers:
            return wanted
        claims = self._patiently(Ledger(lakehouse).rows, self._spec.run, kinds=("claim",))
        return to_replace(claims, wanted, rendezvous=rendezvous, recovers=self._recovers)

    def _check_unfinished(self, lakehouse: Lakehouse) -> None:
        """Raise RunFinished if another launch has ended the run. A catalog that does not answer proves nothing."""
        with suppress(LakehouseError):
            check_unfinished(Ledger(lakehouse).state(self._spec.run))

    def _patiently(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call a function that needs catalog or store. A recovery waits for an unavailable one until a stop is requested."""
        within_s = patience_s(replaces=self._replaces, noticed_by=self._noticed_by)
        return waiting_for(CatalogUnreachable, StoreUnavailable, within_s=within_s, stop=self._stop)(
            call, *args, **kwargs
        )
