"""The supervisor beside the ranks: launches an attempt, watches it, ends it whole when a rank dies, and recovers.

In: a job spec. Out: events for whoever watches, a row in `recoveries` per recovery, and how the run ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from catalog import errors
from catalog.connect import Lakehouse, connect
from catalog.errors import (
    BadInput,
    CheckpointError,
    DataFileUnreadable,
    DlacError,
    LedgerError,
    NoProgress,
    Preempted,
    RunFinished,
    SpecInvalid,
    SteppedAside,
    TrainingFailed,
)
from catalog.ledger import Ledger
from catalog.plans import get_plan
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.fork_server import RankStarter
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.recover.attempt import HANG, Ending, Event, Launcher, SupervisedAttempt, waiting_for_catalog
from dlac_pipeline.recover.coordinator import attempts_without_progress
from dlac_pipeline.recover.incident import Failure, gave_up
from dlac_pipeline.recover.leg_choice import RESUME, Wish
from dlac_pipeline.recover.run_lock import run_lock
from dlac_pipeline.recover.same_rows import Deaths, rows_in_hand
from dlac_pipeline.recover.unreadable import damaged_row_group
from dlac_pipeline.spec import JobSpec

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_TERMINAL = (BadInput, LedgerError, CheckpointError, Preempted)
"""Errors of a rank that another attempt would meet again, here and now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a supervised run ended."""

    ending: Ending
    """finished; caught up with what is appended; stopped when asked to, behind a checkpoint; left: the script returned early."""
    attempts: int
    """Attempts that this supervisor launched."""
    step: int


class Supervisor:
    """Runs a job to its end, through as many attempts as it takes."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        wish: Wish = RESUME,
        replaces: int | None = None,
        takeover: bool = False,
        wait_s: float = 0.0,
        noticed_by: str = "operator",
        noticed_at: float | None = None,
        launched_by: str = "",
    ) -> None:
        """`spec` is resolved; `replaces` names the failed attempt of a recovery, `noticed_by` who saw it fail, and when."""
        self._launched_at = time.time()
        self._noticed_at = self._launched_at if noticed_at is None else min(noticed_at, self._launched_at)
        self._launched_by = launched_by
        self._spec = spec
        self._on_event = on_event
        self._wish = wish
        self._replaces = replaces
        self._takeover = takeover
        self._wait_s = wait_s
        self._noticed_by = noticed_by
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ask for an orderly end: checkpoint, then leave, within the grace period. Safe from signal handlers."""
        self._stop.set()

    def run(self) -> Outcome:
        """Launch, watch, recover until the run ends.

        Raises:
            SpecInvalid: the training script is not there.
            RunBusy: another launch is alive and `takeover` was not asked for.
            NoProgress: attempt after attempt committed nothing.
            DlacError: what a rank died of, when another attempt would meet it again.
        """
        spec = self._spec
        if not Path(spec.launch.script).is_file():
            raise SpecInvalid(
                f"expected a training script at launch.script = {spec.launch.script!r}, found no such file"
            )
        tiers_of(spec).check_writable()
        lakehouse = self._patiently(connect, spec.lakehouse)
        replaces = self._checked_target(lakehouse)
        starter = RankStarter()
        launcher = Launcher(
            spec=spec,
            lakehouse=lakehouse,
            starter=starter,
            on_event=self._on_event,
            stop=self._stop,
            noticed_by=self._noticed_by,
            noticed_at=self._noticed_at,
            launched_at=self._launched_at,
            launched_by=self._launched_by,
        )
        lock = run_lock(
            spec.checkpoint.local,
            spec.run,
            wait_s=self._wait_s,
            takeover=self._takeover,
            may_replace=lambda: _check_current(lakehouse, spec.run, replaces),
        )
        with lock, closing(starter):
            fruitless, attempts = 0, 0
            deaths = Deaths(spec.launch.deaths_at_same_rows)
            failure: Failure | None = None
            ending: Ending | Failure
            while True:
                attempts += 1
                attempt = SupervisedAttempt(launcher, wish=self._wish, replaces=replaces, failure=failure)
                try:
                    ending = attempt.run()
                except RunFinished:
                    if failure is None:
                        raise
                    if failure.kind not in ("", HANG):
                        raise TrainingFailed(
                            f"the run is finished, but its script failed afterwards: {failure.cause}"
                        ) from None
                    ending = "finished"  # the attempt that failed had committed everything
                if isinstance(ending, str):
                    return Outcome(ending=ending, attempts=attempts, step=attempt.step)
                replaces, failure = attempt.number, ending
                fruitless = 0 if attempt.committed else fruitless + 1
                self._raise_if_final(ending)
                if self._left_out(lakehouse, ending, attempt.leg):
                    fruitless = 0
                elif deaths.died(ending, committed=attempt.committed):
                    self._quarantine(lakehouse, ending, attempt)
                    fruitless = 0
                if fruitless >= spec.launch.attempts_without_progress:  # a commit can land and its event be lost
                    fruitless = min(fruitless, attempts_without_progress(Ledger(lakehouse).rows(spec.run)))
                if fruitless >= spec.launch.attempts_without_progress and not (
                    deaths.undecided and deaths.count >= fruitless
                ):
                    self._give_up(lakehouse, ending, fruitless, attempt.number)

    def _left_out(self, lakehouse: Lakehouse, failure: Failure, leg: Leg | None) -> bool:
        """Whether the attempt died on a row group that the next one leaves out.

        Raises:
            DataFileUnreadable: it is damaged, and the policy is to stop.
        """
        if leg is None or "row_group" not in failure.detail:
            return False
        found = damaged_row_group(lakehouse, self._spec, leg, failure.detail["path"], failure.detail["row_group"])
        if found is None:
            return False
        if found.policy == "fail":
            raise DataFileUnreadable(failure.message)
        self._wish = replace(self._wish, unreadable=(*self._wish.unreadable, found.unreadable))
        self._on_event({"run": self._spec.run, "event": "quarantine", **asdict(found.unreadable)})
        return True

    def _checked_target(self, lakehouse: Lakehouse) -> int | None:
        """The attempt that is replaced, fixed before waiting for anybody: who comes second steps aside, and fences nobody."""
        state = self._patiently(Ledger(lakehouse).state, self._spec.run)
        if state.finished:
            raise RunFinished(
                f"run {self._spec.run!r} is finished at checkpoint {state.fence.head!r} and takes no more attempts"
            )
        for plan_id in self._wish.plan_ids:
            get_plan(lakehouse, plan_id)
        target = state.fence.attempt if self._takeover and self._replaces is None else self._replaces
        _check_current(lakehouse, self._spec.run, target)
        return target

    def _patiently(self, call: Callable[[Argument], Result], argument: Argument) -> Result:
        """Call what needs the catalog; a recovery waits for a catalog that is away."""
        return waiting_for_catalog(recovering=self._replaces is not None)(call, argument)

    def _quarantine(self, lakehouse: Lakehouse, failure: Failure, attempt: SupervisedAttempt) -> None:
        """Have the next attempt leave out the rows that the last ones had in hand when they died."""
        assert attempt.leg is not None, "it has trained"
        step = failure.in_hand
        times = self._spec.launch.deaths_at_same_rows
        reason = f"{times} attempts in a row died in step {step} with these rows in hand; the last one: {failure.cause}"
        rows = rows_in_hand(lakehouse, self._spec, attempt.leg, step=step, folder=attempt.folder, reason=reason)
        self._wish = replace(self._wish, unreadable=(*self._wish.unreadable, *rows))
        told = {"row_groups": len(rows), "rows": sum(len(each.positions) for each in rows), "reason": reason}
        self._on_event({"run": self._spec.run, "event": "quarantine", "step": step, **told})

    def _raise_if_final(self, failure: Failure) -> None:
        """Raise what a rank died of if another attempt would meet it again, or if none is wanted."""
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, _TERMINAL):
            raise kind(failure.message)
        if self._stop.is_set():
            raise TrainingFailed(
                f"the ranks did not leave within {self._spec.launch.leave_s:.0f} s when asked: {failure.cause}"
            )

    def _give_up(self, lakehouse: Lakehouse, failure: Failure, fruitless: int, attempt: int) -> None:
        try:
            gave_up(lakehouse, self._spec.run, attempt, failure)
        except DlacError as err:
            self._on_event({"run": self._spec.run, "event": "warning", "message": f"giving up was not recorded: {err}"})
        raise NoProgress(
            f"{fruitless} attempts in a row of run {self._spec.run!r} committed nothing; the last one: {failure.cause}; "
            "read its logs, mend the cause, then train again"
        )


def _check_current(lakehouse: Lakehouse, run: str, attempt: int | None) -> None:
    """Check that `attempt`, if one is to be replaced, is still the current one.

    Raises:
        SteppedAside: it is not: somebody else took the run over.
    """
    current = Ledger(lakehouse).state(run).fence.attempt
    if attempt is not None and current != attempt:
        raise SteppedAside(
            f"expected attempt {attempt} of run {run!r} to be the current one, found attempt {current}: another launch "
            "owns the run; nothing to do"
        )
