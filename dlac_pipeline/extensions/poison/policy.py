"""Policy after deaths at the same rows or at the same line of the script, and after a damaged row group."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

from dlac_pipeline.extensions.poison.poison_rows import CrashLoop, damaged_row_group, rows_in_hand
from dlac_pipeline.lakehouse.errors import DataFileUnreadable, NoProgress, ScriptFailed
from dlac_pipeline.plan.legs.leg import Leg, Unreadable
from dlac_pipeline.supervise.attempt import SupervisedAttempt
from dlac_pipeline.supervise.failure import Failure
from dlac_pipeline.supervise.policies.row_policies import RestartContext


class PoisonRows:
    """Policy that leaves out a damaged row group, or the rows in hand of attempts that died of them."""

    def __init__(self, context: RestartContext) -> None:
        self._context = context
        self._crash_loop = CrashLoop(context.spec.launch.deaths_at_same_rows)

    @property
    def undecided(self) -> int:
        """Number of deaths in a row at the current step, if more would lead to a quarantine."""
        return self._crash_loop.in_a_row if self._crash_loop.undecided else 0

    def rows_to_leave_out(self, attempt: SupervisedAttempt, failure: Failure) -> Sequence[Unreadable]:
        """Return the damaged row group of a failure, or the rows that the last attempts had in hand when they died.

        Raises:
            DataFileUnreadable: a row group is damaged, and the job spec leaves none out.
            ScriptFailed: the script raised the same exception at the same place twice in a row.
            NoProgress: an attempt died in the same way without the rows.
        """
        if damaged := self._context.retry(self._damaged, failure, attempt.leg):
            return damaged
        follows = self._crash_loop.decide(failure, committed=attempt.committed)
        if follows == "stop":
            self._raise_hopeless(failure, attempt.number)
        return self._context.retry(self._quarantined, attempt, failure) if follows == "leave out" else ()

    def _raise_hopeless(self, failure: Failure, attempt: int) -> NoReturn:
        """Give the run up, because a death repeats with any rows."""
        run, give_up = self._context.spec.run, self._context.give_up
        if failure.script_raised:
            found = "found the same one at the same place in two attempts in a row: fix the script"
            expected = f"expected the script of run {run!r} to get past an exception"
            give_up(failure, attempt, ScriptFailed, f"{expected}, {found}")
        expected = f"expected run {run!r} to get past step {failure.in_hand} without the rows that it died with"
        found = "found the same death with other rows: fix the cause"
        give_up(failure, attempt, NoProgress, f"{expected}, {found}")

    def _damaged(self, failure: Failure, leg: Leg | None) -> Sequence[Unreadable]:
        """Return the row group on which the attempt died, if the next attempt leaves it out."""
        if leg is None or "row_group" not in failure.detail:
            return ()
        path, row_group = failure.detail["path"], failure.detail["row_group"]
        found = damaged_row_group(self._context.plans, self._context.spec, leg, path, row_group)
        if found is None:
            return ()
        unreadable, policy = found
        if policy == "fail":
            raise DataFileUnreadable(failure.message)
        self._context.publish({"event": "quarantine", **asdict(unreadable)})
        return (unreadable,)

    def _quarantined(self, attempt: SupervisedAttempt, failure: Failure) -> Sequence[Unreadable]:
        """Return the rows that the last attempts had in hand when they died."""
        assert attempt.leg is not None, "it has trained"
        spec, step = self._context.spec, failure.in_hand
        times = spec.launch.deaths_at_same_rows
        count = min(times, 2) if failure.script_raised else times
        reason = (
            f"{count} attempts in a row died in step {step} with these rows in hand; the last one: {failure.summary}"
        )
        rows = rows_in_hand(self._context.plans, spec, attempt.leg, step=step, folder=attempt.folder)
        return self._context.leave_out(rows, step=step, reason=reason)
