"""Restart policy after a failed attempt: another attempt, the rows that it leaves out, or the end of the run."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
from dlac_pipeline.lakehouse.retrying import RETRY_WITHIN_S, retrying
from dlac_pipeline.plan.legs.leg import Unreadable
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.attempt import SupervisedAttempt
from dlac_pipeline.supervise.claims import attempts_without_progress
from dlac_pipeline.supervise.failure import STUCK, Failure
from dlac_pipeline.supervise.policies.row_policies import RestartContext, load_policies
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder
from dlac_pipeline.supervise.supervision import StopRequests

_GIVEN_UP = (errors.BadInput, errors.LossNotFinite, errors.LossSpiked)
"""Errors of a rank that every attempt meets again. The run is given up."""
_TERMINAL = (errors.LedgerError, errors.CheckpointError, errors.Preempted, errors.AppendHistoryLost, *_GIVEN_UP)
"""Errors of a rank that another attempt would meet again, here and now."""


class RestartPolicy:
    """Restart policy of one supervisor, from the attempts that it has seen."""

    def __init__(
        self,
        spec: JobSpec,
        plans: Plans,
        stops: StopRequests,
        recorder: RecoveryRecorder,
        publish: Callable[[Event], None],
    ) -> None:
        self._spec = spec
        self._ledger = Ledger(plans.lakehouse)
        self._stops = stops
        self._recorder = recorder
        self._publish = publish
        outages = (errors.CatalogUnreachable, errors.StoreUnavailable)
        self._retry = retrying(RETRY_WITHIN_S, of=outages, stop=stops.stop)
        self._fruitless = self._failed = 0
        self.spike_step = 0
        """Step of the last loss spike for which rows were left out. Spikes up to it are trained through."""
        self.copies_at_once = False
        """True once a state has changed while it was copied beside training: later attempts copy at once."""
        context = RestartContext(spec=spec, plans=plans, publish=publish, retry=self._retry, give_up=self._give_up)
        self._policies = load_policies(context)

    def note_rescale(self, attempt: SupervisedAttempt) -> None:
        """Note the planned end of an attempt. This is no failure, and is progress only if it committed something."""
        if attempt.committed:
            self._fruitless = 0

    def follow_others(self) -> None:
        """Count the attempts without progress in the ledger, because other nodes have led since the last count."""
        rows = self._retry(self._ledger.rows, self._spec.run, kinds=HEAD_KINDS)
        self._fruitless = attempts_without_progress(rows)

    def plan_restart(self, attempt: SupervisedAttempt, failure: Failure) -> Sequence[Unreadable]:
        """Return the row groups and rows that the next attempt leaves out in addition.

        Raises:
            NoProgress: no attempt follows, because several in a row committed nothing.
            OutOfMemory: no attempt follows, because a rank could not allocate memory before a checkpoint.
            ScriptFailed: no attempt follows, because the script raises the same exception at the same place.
            TrainingFailed: no attempt follows, because `launch.max_restarts` is reached, or a stop was requested.
            DlacError: no attempt follows, because it would end in the same way.
        """
        if failure.lost_memory:  # the next attempt reads a checkpoint, and is counted
            self._raise_if_final(attempt.number, failure)
            return ()
        self._fruitless = 0 if attempt.committed else self._fruitless + 1
        self.copies_at_once |= failure.kind == errors.StateChanged.__name__
        if not (attempt.others and (failure.kind == errors.Preempted.__name__ or self._stops.leaving.is_set())):
            self._raise_if_final(attempt.number, failure)
        if failure.lacked_memory and not attempt.committed:
            expected = f"expected memory for the script of run {self._spec.run!r}"
            todo = "lower order.batch_size, use smaller micro-batches, more ranks or a smaller model, or free memory"
            found = f"found that rank {failure.rank} could not allocate it: {todo}"
            self._give_up(failure, attempt.number, errors.OutOfMemory, f"{expected}, {found}")
        left_out = self._rows_to_leave_out(attempt, failure)
        self._check_restarts(attempt.number, failure)
        if left_out:
            self._fruitless = 0
        limit = self._spec.launch.attempts_without_progress
        if self._fruitless >= limit:  # the event of a commit may be lost
            rows = self._retry(self._ledger.rows, self._spec.run, kinds=HEAD_KINDS)
            self._fruitless = min(self._fruitless, attempts_without_progress(rows))
        if self._fruitless >= limit and not self._awaits_verdict():
            found = f"{self._fruitless} attempts in a row of run {self._spec.run!r} committed nothing: fix the cause"
            self._give_up(failure, attempt.number, errors.NoProgress, found, last="the last one: ")
        return left_out

    def _check_restarts(self, attempt: int, failure: Failure) -> None:
        most = self._spec.launch.max_restarts
        self._failed += 1
        if most is not None and self._failed > most:
            found = f"{self._failed} attempts of run {self._spec.run!r} failed, with launch.max_restarts = {most}: fix the cause"
            self._give_up(failure, attempt, errors.TrainingFailed, found, last="the last one: ")

    def _rows_to_leave_out(self, attempt: SupervisedAttempt, failure: Failure) -> Sequence[Unreadable]:
        """Return the rows that the next attempt leaves out by the policies of extensions."""
        named = self._policies.get(failure.policy)
        for policy in self._policies.values() if named is None else [named]:
            if rows := policy.rows_to_leave_out(attempt, failure):
                if failure.kind == errors.LossSpiked.__name__:
                    self.spike_step = failure.detail["step"]
                return rows
        return ()

    def _awaits_verdict(self) -> bool:
        """Return True if a policy may yet find the rows that all attempts without progress failed on."""
        return any(0 < self._fruitless <= each.undecided for each in self._policies.values())

    def _give_up(
        self, failure: Failure, attempt: int, error: type[errors.TrainingFailed], found: str, *, last: str = ""
    ) -> NoReturn:
        """Record that the run is given up, and raise the error."""
        self._recorder.give_up(failure, attempt, self._publish)
        rank = "" if failure.rank < 0 else f" --rank {failure.rank}"
        logs = f"its output: `dlac logs {self._spec.run} --attempt {attempt}{rank}`"
        raise error(f"{found}, then train again; {logs}; {last}{failure.describe()}")

    def _raise_if_final(self, attempt: int, failure: Failure) -> None:
        """Raise the error of a rank if another attempt would meet it again, or if a stop was requested."""
        kind = errors.error_class(failure.kind)
        is_curable = failure.policy or kind is errors.StateChanged
        if kind is not None and issubclass(kind, _TERMINAL) and not is_curable:
            if issubclass(kind, _GIVEN_UP):
                self._recorder.give_up(failure, attempt, self._publish)
            raise kind(failure.message)
        if self._stops.stop.is_set():
            stuck = "the ranks were asked to leave and did not"
            what = stuck if failure.kind == STUCK else "an attempt that was to end failed"
            raise errors.TrainingFailed(
                f"{what}: {failure.summary}; the committed checkpoints are kept, start the run again to resume after it"
            )
