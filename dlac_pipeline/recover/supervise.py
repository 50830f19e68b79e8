"""The supervisor beside the ranks: launches an attempt, watches it, ends it whole when a rank dies, and recovers.

In: a job spec. Out: events for whoever watches, a row in `recoveries` per recovery, and how the run ended.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import tenacity

from catalog import errors
from catalog.connect import Lakehouse, connect
from catalog.durable_io import write_durably
from catalog.errors import (
    BadInput,
    CatalogUnreachable,
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
from dlac_pipeline.checkpoint.store import storing, tiers_of
from dlac_pipeline.launch import Exit, RankGroup
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.recover.coordinator import ResumePoint, attempts_without_progress, new_nonce, take_over
from dlac_pipeline.recover.incident import Failure, Incident, failure_of_attempt
from dlac_pipeline.recover.leg_choice import RESUME, Wish
from dlac_pipeline.recover.run_lock import run_lock
from dlac_pipeline.recover.unreadable import damaged_row_group
from dlac_pipeline.spec import JobSpec

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Event = dict[str, Any]
Ending = Literal["finished", "caught_up", "stopped", "left"]
_POLL_S = 0.05
_STEP_EVENT_EVERY_S = 0.5
HANG = "Hang"
"""Kind of the failure of a rank that gives no sign of life."""
_PATIENCE_S = 180.0
"""How long a recovery waits for a catalog that is away."""
_LEAVE_MARGIN_S = 2.0
"""What ranks get on top of their deadline: they keep it themselves, and say what was lost."""
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
        launched_by: str = "",
    ) -> None:
        """`spec` is resolved; `replaces` names the failed attempt of a recovery, `noticed_by` who saw it fail."""
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
        with run_lock(
            spec.checkpoint.local,
            spec.run,
            wait_s=self._wait_s,
            takeover=self._takeover,
            may_replace=lambda: _check_current(lakehouse, spec.run, replaces),
        ):
            fruitless, attempts = 0, 0
            failure: Failure | None = None
            ending: Ending | Failure
            while True:
                attempts += 1
                attempt = _Attempt(self, lakehouse, replaces=replaces, failure=failure)
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
                fruitless = 0 if attempt.committed or self._left_out(lakehouse, ending, attempt.leg) else fruitless + 1
                if fruitless >= spec.launch.attempts_without_progress:  # a commit can land and its event be lost
                    fruitless = min(fruitless, attempts_without_progress(Ledger(lakehouse).rows(spec.run)))
                self._give_up_if_hopeless(ending, fruitless)

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
        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(CatalogUnreachable),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_after_delay(_PATIENCE_S if self._replaces is not None else 0.0),
            reraise=True,
        )
        return tries(call, argument)

    def _give_up_if_hopeless(self, failure: Failure, fruitless: int) -> None:
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, _TERMINAL):
            raise kind(failure.message)
        if self._stop.is_set():
            raise TrainingFailed(
                f"the ranks did not leave within {self._spec.launch.leave_s:.0f} s when asked: {failure.cause}"
            )
        if fruitless >= self._spec.launch.attempts_without_progress:
            raise NoProgress(
                f"{fruitless} attempts in a row of run {self._spec.run!r} committed nothing; the last one: {failure.cause}; "
                "read its logs, mend the cause, then train again"
            )


class _Attempt:
    """One launch, from spawning the ranks to their end."""

    def __init__(
        self, supervisor: Supervisor, lakehouse: Lakehouse, *, replaces: int | None, failure: Failure | None
    ) -> None:
        self._spec = supervisor._spec
        self._supervisor = supervisor
        self._lakehouse = lakehouse
        self._replaces = replaces
        self._failure = failure
        self._nonce = new_nonce()
        self._folder = Path(self._spec.checkpoint.local) / self._spec.run / f"launch-{self._nonce}"
        self._events_read = 0
        self._incident: Incident | None = None
        self._said_step_at = 0.0
        self._resumable_at = 0.0
        self.number = 0
        self.leg: Leg | None = None
        self.step = 0
        self.committed = False
        self._ending: Ending = "left"

    def run(self) -> Ending | Failure:
        """The whole attempt. No rank is left when it returns or raises."""
        with storing(self._folder):
            self._folder.mkdir(parents=True)
            (self._folder / "spec.json").write_text(self._spec.model_dump_json())
        ranks = RankGroup(self._spec, self._folder)  # they import their libraries while the run is claimed
        try:
            point = self._take_over()
            self.number, self.step = point.attempt, point.step
            self.leg = leg = Leg.from_json(point.leg)
            live_rows = sum(get_plan(self._lakehouse, source.plan_id).live_rows for source in leg.sources)
            for message in leg.warnings(live_rows, self._spec.launch.world_size):
                self._say({"event": "warning", "message": message})
            self._say({"event": "attempt", "attempt": point.attempt, "step": point.step, "pids": ranks.pids})
            with storing(self._folder):
                write_durably(self._folder / "resume.json", point.to_json().encode())
            self._resumable_at = time.time()
            return self._watch(ranks)
        finally:
            ranks.end()
            self._forward_events()

    def _take_over(self) -> ResumePoint:
        supervisor = self._supervisor
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(CatalogUnreachable),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_after_delay(_PATIENCE_S if self._replaces is not None else 0.0),
            reraise=True,
        )
        point: ResumePoint = retrying(
            take_over,
            self._lakehouse,
            self._spec,
            nonce=self._nonce,
            replaces=self._replaces,
            wish=supervisor._wish,
            launch_folder=str(self._folder),
            launched_by=supervisor._launched_by,
        )
        failure = self._failure
        if failure is None and point.replaces > 0:
            rows = Ledger(self._lakehouse).rows(self._spec.run, kinds=("claim",))
            failure = failure_of_attempt(rows, point.replaces, noticed_by=supervisor._noticed_by)
        if failure is not None:
            self._incident = Incident(self._spec, point, failure)
        return point

    def _watch(self, ranks: RankGroup) -> Ending | Failure:
        asked_at: float | None = None
        while True:
            self._forward_events()
            self._follow_progress(ranks)
            failures = ranks.failures()
            if asked_at is not None and any(failure.code == -signal.SIGTERM for failure in failures):
                return "stopped"  # asked while it was starting, before it could listen; nothing is lost
            if failures:
                return self._failed(ranks, _first_cause(failures))
            if ranks.all_exited():
                self._forward_events()
                return self._ending
            now = time.time()
            if self._supervisor._stop.is_set() and asked_at is None:
                asked_at = now
                ranks.ask_to_stop()
            hung = self._hung(ranks, now)
            if hung is not None:
                return self._failed(ranks, hung)
            if asked_at is not None and now > asked_at + self._spec.launch.leave_s + _LEAVE_MARGIN_S:
                return self._failed(ranks, Exit(rank=0, code=1, message="still running after the grace period"))
            time.sleep(_POLL_S)

    def _hung(self, ranks: RankGroup, now: float) -> Exit | None:
        """The rank that has been silent longest, if that is too long; what the supervisor itself took does not count."""
        seen = [0.0 if progress is None else progress.at for progress in ranks.progress()]
        rank = min(range(len(seen)), key=seen.__getitem__)
        silent_s = now - max(seen[rank], self._resumable_at)
        if silent_s <= self._spec.launch.hang_timeout_s:
            return None
        return Exit(rank=rank, code=1, kind=HANG, message=f"no sign of life for {silent_s:.0f} s")

    def _failed(self, ranks: RankGroup, cause: Exit) -> Failure:
        noticed_at = time.time()
        progress = [found for found in ranks.progress() if found is not None]
        last_step = max((found.step for found in progress), default=self.step)
        mine = ranks.progress()[cause.rank]
        ranks.end()
        failure = Failure(
            cause=str(cause),
            kind=cause.kind,
            message=cause.message,
            detail=cause.detail,
            noticed_by="supervisor",
            failed_at=ranks.started_at if mine is None else mine.at,
            noticed_at=noticed_at,
            stopped_at=time.time(),
            last_step=last_step,
        )
        told = {"cause": failure.cause, "step": last_step, **ranks.last_words(cause.rank)}
        self._say({"event": "failure", **told})
        return failure

    def _follow_progress(self, ranks: RankGroup) -> None:
        progress = ranks.progress()
        if any(found is None for found in progress):
            return
        known = [found for found in progress if found is not None]
        self.step = max(self.step, min(found.step for found in known))
        if self._incident is not None and self._incident.observe(known):
            self._report(self._incident)
            self._incident = None
        first = known[0]
        if first.loss_step and time.time() - self._said_step_at >= _STEP_EVENT_EVERY_S:
            self._said_step_at = time.time()
            self._say({"event": "step", "step": first.step, "loss_step": first.loss_step, "loss": first.loss})

    def _report(self, incident: Incident) -> None:
        """Write the recovery down; a run that has recovered does not die of its report."""
        try:
            self._say(incident.report(self._lakehouse))
        except DlacError as err:
            self._say({"event": "warning", "message": f"the recovery could not be recorded: {err}"})

    def _forward_events(self) -> None:
        for event in self._new_events():
            if event["event"] == "checkpoint":
                self.committed = True
            if event["event"] in ("finished", "stopped", "caught_up"):
                self._ending = event["event"]
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
        self._supervisor._on_event({"run": self._spec.run, "attempt": self.number, **event})


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


def _first_cause(failures: list[Exit]) -> Exit:
    """The failure that explains the others: a named error that ends the run, a signal, else the first.

    When one rank dies the others follow with errors of their broken connections, and may be gone before it is.
    """
    failures = sorted(failures, key=lambda failure: failure.at)
    for failure in failures:
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, DlacError):
            return failure
    return next((failure for failure in failures if failure.code < 0), failures[0])
