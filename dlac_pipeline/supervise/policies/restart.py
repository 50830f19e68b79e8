"""Restart policy after a failed attempt: another attempt, the rows that it leaves out, or the end of the run."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NoReturn

from dlac_pipeline.extensions.poison.poison_rows import CrashLoop, damaged_row_group, rows_in_hand, unreadable_rows
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.plan.legs.leg import Leg, Unreadable
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.attempt import SupervisedAttempt
from dlac_pipeline.supervise.claims import attempts_without_progress
from dlac_pipeline.supervise.failure import STUCK, Failure
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder
from dlac_pipeline.supervise.retry_policy import RETRY_WITHIN_S
from dlac_pipeline.supervise.supervision import StopRequests

_GIVEN_UP = (errors.LossNotFinite, errors.LossSpiked)
_TERMINAL = (errors.BadInput, errors.LedgerError, errors.CheckpointError, errors.Preempted, *_GIVEN_UP)
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
        self._plans = plans
        self._ledger = Ledger(plans.lakehouse)
        self._stops = stops
        self._recorder = recorder
        self._publish = publish
        outages = (errors.CatalogUnreachable, errors.StoreUnavailable)
        self._retry = retrying(RETRY_WITHIN_S, of=outages, stop=stops.stop)
        self._fruitless = self._failed = 0
        self.spike_step = 0
        """Step of the last loss spike for which rows were left out. Spikes up to it are trained through."""
        self._crash_loop = CrashLoop(self._spec.launch.deaths_at_same_rows)

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
            self._raise_if_final(failure)
            return ()
        self._fruitless = 0 if attempt.committed else self._fruitless + 1
        spiked = failure.kind == errors.LossSpiked.__name__ and "samples" in failure.detail
        if not spiked and failure.kind in {each.__name__ for each in _GIVEN_UP}:
            self._recorder.give_up(failure, attempt.number, self._publish)
        if not (attempt.others and (failure.kind == errors.Preempted.__name__ or self._stops.leaving.is_set())):
            self._raise_if_final(failure)
        if failure.lacked_memory and not attempt.committed:
            expected = f"expected memory for the script of run {self._spec.run!r}"
            todo = "lower order.batch_size, use smaller micro-batches, more ranks or a smaller model, or free memory"
            found = f"found that rank {failure.rank} could not allocate it: {todo}"
            self._give_up(failure, attempt.number, errors.OutOfMemory, f"{expected}, {found}")
        retry = self._retry
        left_out: Sequence[Unreadable] = retry(self._spiked if spiked else self._damaged, failure, attempt.leg)
        if not left_out:
            follows = self._crash_loop.decide(failure, committed=attempt.committed)
            if follows == "stop":
                self._raise_hopeless(failure, attempt.number)
            if follows == "leave out":
                left_out = retry(self._quarantined, attempt, failure)
        self._check_restarts(attempt.number, failure)
        if left_out:
            self._fruitless = 0
        limit = self._spec.launch.attempts_without_progress
        if self._fruitless >= limit:  # the event of a commit may be lost
            rows = retry(self._ledger.rows, self._spec.run, kinds=HEAD_KINDS)
            self._fruitless = min(self._fruitless, attempts_without_progress(rows))
        if self._fruitless >= limit and not (
            self._crash_loop.undecided and self._crash_loop.in_a_row >= self._fruitless
        ):
            found = f"{self._fruitless} attempts in a row of run {self._spec.run!r} committed nothing: fix the cause"
            self._give_up(failure, attempt.number, errors.NoProgress, found, last="the last one: ")
        return left_out

    def _check_restarts(self, attempt: int, failure: Failure) -> None:
        most = self._spec.launch.max_restarts
        self._failed += 1
        if most is not None and self._failed > most:
            found = f"{self._failed} attempts of run {self._spec.run!r} failed, with launch.max_restarts = {most}: fix the cause"
            self._give_up(failure, attempt, errors.TrainingFailed, found, last="the last one: ")

    def _raise_hopeless(self, failure: Failure, attempt: int) -> NoReturn:
        """Give the run up, because a death repeats with any rows."""
        run = self._spec.run
        if failure.script_raised:
            found = "found the same one at the same place in two attempts in a row: fix the script"
            expected = f"expected the script of run {run!r} to get past an exception"
            self._give_up(failure, attempt, errors.ScriptFailed, f"{expected}, {found}")
        expected = f"expected run {run!r} to get past step {failure.in_hand} without the rows that it died with"
        found = "found the same death with other rows: fix the cause"
        self._give_up(failure, attempt, errors.NoProgress, f"{expected}, {found}")

    def _give_up(
        self, failure: Failure, attempt: int, error: type[errors.TrainingFailed], found: str, *, last: str = ""
    ) -> NoReturn:
        """Record that the run is given up, and raise the error."""
        self._recorder.give_up(failure, attempt, self._publish)
        rank = "" if failure.rank < 0 else f" --rank {failure.rank}"
        logs = f"its output: `dlac logs {self._spec.run} --attempt {attempt}{rank}`"
        raise error(f"{found}, then train again; {logs}; {last}{failure.describe()}")

    def _raise_if_final(self, failure: Failure) -> None:
        """Raise the error of a rank if another attempt would meet it again, or if a stop was requested."""
        kind = errors.error_class(failure.kind)
        if kind is not None and issubclass(kind, _TERMINAL) and "samples" not in failure.detail:
            raise kind(failure.message)
        if self._stops.stop.is_set():
            stuck = "the ranks were asked to leave and did not"
            what = stuck if failure.kind == STUCK else "an attempt that was to end failed"
            raise errors.TrainingFailed(
                f"{what}: {failure.summary}; the committed checkpoints are kept, start the run again to resume after it"
            )

    def _damaged(self, failure: Failure, leg: Leg | None) -> Sequence[Unreadable]:
        """Return the row group on which the attempt died, if the next attempt leaves it out."""
        if leg is None or "row_group" not in failure.detail:
            return ()
        path, row_group = failure.detail["path"], failure.detail["row_group"]
        found = damaged_row_group(self._plans, self._spec, leg, path, row_group)
        if found is None:
            return ()
        unreadable, policy = found
        if policy == "fail":
            raise errors.DataFileUnreadable(failure.message)
        self._publish({"event": "quarantine", **asdict(unreadable)})
        return (unreadable,)

    def _spiked(self, failure: Failure, leg: Leg | None) -> Sequence[Unreadable]:
        """Return the rows to blame for a loss spike, by the samples that the ranks named."""
        from dlac_pipeline.extensions.replay.step_rows import (
            StepRows,  # it imports DuckDB, which costs each launch time
        )

        steps = StepRows(self._plans.lakehouse, self._spec.run, spec=self._spec)
        found = defaultdict[tuple[str, int], set[int]](set)
        self.spike_step = failure.detail["step"]
        rows = steps.of_found(steps.steps.find_trained(self.spike_step))
        for slot, place, count in failure.detail["samples"]:
            mine = [row for row in rows if row.slot == slot]
            for row in [mine[place]] if len(mine) == count else mine:
                found[row.file_path, row.row_group].add(row.row)
        return self._left_out(unreadable_rows(found, failure.message), self.spike_step, failure.message)

    def _left_out(self, rows: Sequence[Unreadable], step: int, reason: str) -> Sequence[Unreadable]:
        counts = {"row_groups": len(rows), "rows": sum(len(each.positions) for each in rows)}
        self._publish({"event": "quarantine", "step": step, **counts, "reason": reason, "tentative": True})
        return rows

    def _quarantined(self, attempt: SupervisedAttempt, failure: Failure) -> Sequence[Unreadable]:
        """Return the rows that the last attempts had in hand when they died."""
        assert attempt.leg is not None, "it has trained"
        step, times, plans = failure.in_hand, self._spec.launch.deaths_at_same_rows, self._plans
        count = min(times, 2) if failure.script_raised else times
        reason = (
            f"{count} attempts in a row died in step {step} with these rows in hand; the last one: {failure.summary}"
        )
        rows = rows_in_hand(plans, self._spec, attempt.leg, step=step, folder=attempt.folder, reason=reason)
        return self._left_out(rows, step, reason)
