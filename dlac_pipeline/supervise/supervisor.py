"""Supervisor of a node's ranks: it launches an attempt, watches it, ends all its ranks when one dies, and recovers."""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace

from dlac_pipeline.elastic.membership import EndedElsewhere, Membership
from dlac_pipeline.elastic.round import VERDICT, Round
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.attempt import Rescale, SupervisedAttempt
from dlac_pipeline.supervise.attempts import Attempts
from dlac_pipeline.supervise.failure import Failure, planned_end
from dlac_pipeline.supervise.follower_attempt import AttemptVerdict
from dlac_pipeline.supervise.policies.restart import RestartPolicy
from dlac_pipeline.supervise.ranks.rank_events import Ending, Event
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.ranks.run_events import RunEvents
from dlac_pipeline.supervise.start.request import ResumeOptions
from dlac_pipeline.supervise.supervision import StopRequests, Supervision, check_request
from dlac_pipeline.supervise.takeover import Takeover


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a supervised run."""

    ending: Ending
    """Caught up: no appended rows are left. Stopped: on request, after a checkpoint. Left: the script returned early."""
    attempts: int
    """Attempts that this supervisor launched."""
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """State of a supervisor after the catalog and the store have answered."""

    attempts: Attempts
    events: RunEvents
    membership: Membership
    takeover: Takeover
    restart_policy: RestartPolicy


class Supervisor:
    """Supervisor of a job: it runs the job to its end, in as many attempts as needed. With several nodes, one runs on each."""

    def __init__(
        self,
        request: Request,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        starter: RankStarter | None = None,
    ) -> None:
        self._launched_at = time.time()
        self._request = request
        self._spec = request.spec
        self._on_event = on_event
        self._starter = starter or RankStarter()
        self._listeners = request.spec.event_receiver(launched_by=request.launched_by)
        self._options = ResumeOptions(repin=request.repin)
        self._stops = StopRequests()
        self._failure: Failure | None = None
        self._attempts, self._step = 0, 0

    def stop(self) -> None:
        """Request a checkpoint and exit within the grace period. Call it from any thread, but not from a signal handler."""
        self._stops.stop.set()

    def leave(self) -> None:
        """Ask this node to exit. The run continues without it if enough other nodes exist."""
        self._stops.leave()

    def run(self) -> Outcome:
        """Launch attempts, watch them, and recover, until the run ends.

        Raises:
            SpecInvalid: the training script or a listener does not exist.
            RunBusy: another launch is alive, and `takeover` was not requested.
            NodesMissing: fewer nodes came than the job spec requires.
            NoProgress: several attempts in a row committed nothing.
            ScriptFailed: the script raised the same exception at the same place twice in a row.
            DlacError: a rank failed with an error that another attempt would meet again.
        """
        check_request(self._request)
        try:
            with closing(self._starter), self._listeners or nullcontext():
                self._starter.begin(self._spec)
                return self._run()
        except (errors.CatalogUnreachable, errors.StoreUnavailable, errors.RunBusy):
            if not self._stops.stop.is_set() or self._attempts:
                raise
            return self._outcome("stopped")  # the stop came while it waited for the catalog, the store or the lock

    def _run(self) -> Outcome:
        supervision = Supervision.connect(self._request, self._stops, self._launched_at)
        spec, ledger = self._spec, supervision.ledger_uuid
        events = RunEvents(spec.run, self._on_event, self._listeners, ledger=ledger)
        attempts = Attempts(supervision, self._starter, events)
        policy = RestartPolicy(spec, supervision.plans, self._stops, attempts.recorder, events.publish)
        membership = Membership.of_job(spec, ledger=ledger, serve_memory=attempts.memory.serve)
        with closing(attempts), closing(membership), closing(Takeover(supervision)) as takeover:
            launch = _Launch(
                attempts=attempts, events=events, membership=membership, takeover=takeover, restart_policy=policy
            )
            while True:
                try:
                    round_ = self._next_round(launch)
                except errors.RunFinished as err:
                    return self._conclude(self._finished_before(takeover, err))
                except EndedElsewhere as ended:
                    return self._conclude(AttemptVerdict.from_message(ended.message))
                if round_ is None:
                    return self._outcome("stopped")
                with closing(round_):
                    verdict = self._lead(launch, round_) if round_.leads else self._follow(launch, round_)
                    if verdict.restart is None or self._stops.stop.is_set():
                        round_.part()
                        return self._conclude(verdict)
                    if round_.cut_off:
                        membership.forget()

    def _conclude(self, verdict: AttemptVerdict) -> Outcome:
        self._step = verdict.step or self._step
        if verdict.error is not None:
            kind, message = verdict.error
            raise errors.error_from_kind(kind, message, default=errors.TrainingFailed)
        return self._outcome(verdict.ending or "stopped")

    def _outcome(self, ending: Ending) -> Outcome:
        return Outcome(ending=ending, attempts=self._attempts, step=self._step)

    def _next_round(self, launch: _Launch) -> Round | None:
        """Return the round of the next attempt, or None if a stop was requested. Raises as `Membership.next_round`."""
        takeover = launch.takeover
        try:
            return launch.membership.next_round(takeover.replaces or 0, self._stops.stop, takeover.check_unfinished)
        except errors.NodesMissing:
            if self._failure is not None and takeover.replaces is not None and takeover.holds_lock:
                launch.attempts.recorder.give_up(self._failure, takeover.replaces, launch.events.publish)
            raise

    def _lead(self, launch: _Launch, round_: Round) -> AttemptVerdict:
        """Run an attempt and decide its consequence for all nodes. They have received an error that this raises."""
        error: errors.DlacError | None = None
        try:
            verdict = self._attempt(launch, round_)
        except errors.DlacError as err:
            if launch.takeover.others_resumed(round_, err):
                failure = planned_end(f"other nodes resumed the run: {err}", step=self._step)
                verdict = AttemptVerdict(restart=failure)
            else:
                error, verdict = err, AttemptVerdict(error=(errors.error_kind(err), str(err)), step=self._step)
        self._step = verdict.step
        self._forget_memory(launch, verdict)
        if verdict.restart is None and not self._stops.leaving.is_set():
            # before this node exits, because it may serve the rendezvous
            launch.membership.end_run(asdict(verdict))
        round_.announce(VERDICT, asdict(verdict))
        round_.acknowledge()
        if error is not None:
            round_.part()
            raise error
        return verdict

    def _forget_memory(self, launch: _Launch, verdict: AttemptVerdict) -> None:
        """Remove this node's states in memory if a loss of them ended the attempt. No rank of the node is left."""
        kinds = {verdict.error[0] if verdict.error else "", verdict.restart.kind if verdict.restart else ""}
        if kinds & {errors.LossNotFinite.__name__, errors.LossSpiked.__name__}:
            launch.attempts.memory.forget()

    def _follow(self, launch: _Launch, round_: Round) -> AttemptVerdict:
        """Run an attempt that another node leads. Return the leader's verdict."""
        takeover = launch.takeover
        takeover.follow()
        self._attempts += 1
        verdict = launch.attempts.follow(round_, takeover.replaces or 0).run()
        self._forget_memory(launch, verdict)
        takeover.replaces = verdict.attempt or takeover.replaces
        self._failure, self._step = verdict.restart, verdict.step
        return verdict

    def _attempt(self, launch: _Launch, round_: Round) -> AttemptVerdict:
        """Run an attempt, if the run may be claimed."""
        takeover = launch.takeover
        try:
            if takeover.lead():
                launch.restart_policy.follow_others()
        except errors.RunFinished as err:
            return self._finished_before(takeover, err)
        options = replace(self._options, plans=takeover.plans)
        while True:
            attempt = launch.attempts.lead(round_, options, replaces=takeover.replaces, failure=self._failure)
            self._attempts += 1
            try:
                return self._run_attempt(launch, attempt)
            except errors.SteppedAside:
                if round_.others or not takeover.replace_late_claim():
                    raise
                self._attempts -= 1  # a launch that stepped aside was no attempt

    def _run_attempt(self, launch: _Launch, attempt: SupervisedAttempt) -> AttemptVerdict:
        """Run an attempt, and decide if another one follows. Raises as `RestartPolicy.plan_restart` if none does."""
        try:
            end = attempt.run()
        except errors.RunFinished as err:
            return self._finished_before(launch.takeover, err)
        except (errors.CatalogUnreachable, errors.CommitOutcomeUnknown):
            if attempt.number or not self._stops.stop.is_set():
                raise
            end = attempt.end_before_training()  # the stop came while it waited
        if isinstance(end, str):
            return AttemptVerdict(ending=end, attempt=attempt.number, step=attempt.step or self._step)
        if attempt.number:  # 0: it ended before it had a resume point
            launch.takeover.replaces = attempt.number
        if isinstance(end, Rescale):
            self._failure = end.cause
            launch.restart_policy.note_rescale(attempt)
        else:
            self._failure = end
            left_out = launch.restart_policy.plan_restart(attempt, end)
            policy, unreadable = launch.restart_policy, (*self._options.unreadable, *left_out)
            self._options = replace(self._options, unreadable=unreadable, spike_step=policy.spike_step)
            self._options = replace(self._options, copies_at_once=policy.copies_at_once)
        return AttemptVerdict(restart=self._failure, attempt=attempt.number, step=attempt.step)

    def _finished_before(self, takeover: Takeover, err: errors.RunFinished) -> AttemptVerdict:
        """Return the verdict for a run that was finished before this claim: the failed attempt had committed everything."""
        if self._failure is None:
            raise err
        if self._failure.blames_script:
            raise errors.TrainingFailed(
                f"the run is finished, but its script failed afterwards: {self._failure.describe()}"
            )
        attempt, step = takeover.finish_of_run()
        return AttemptVerdict(ending="finished", attempt=attempt, step=step)
