"""The demo's Dagster runs while they run: their events as lines, the steps as bars, and the faults that strike them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from dlac_pipeline.dagster.sensors.recovery import RECOVERS_TAG
from dlac_pipeline.lakehouse.errors import TrainingFailed
from examples.demo.events import RunEvents, describe, rows_of_plan
from examples.demo.live_run import LiveRun

_RECOVERY_WITHIN_S = 120.0


class Screen:
    """Lines with the seconds since the start, above the progress bars of the trainings."""

    def __init__(self, console: Console) -> None:
        self._began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("step"), MofNCompleteColumn())
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def passed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def say(self, about: str, line: str, style: str = "") -> None:
        """Print a line."""
        text = Text.assemble(f"{self.passed_s():5.0f} s  ", (f"{about:<13}", "bold"), (line, style))
        self.bars.console.print(text, soft_wrap=True)


@dataclass(slots=True)
class Fault:
    """One SIGKILL of a process of a run, after a share of its steps."""

    name: str
    at_share: float
    strike: Callable[[], bool]
    struck: bool = False


class FollowedRun:
    """A Dagster run of the demo. Its events are shown while it runs."""

    def __init__(self, instance: dg.DagsterInstance, run_id: str, screen: Screen, title: str) -> None:
        self._instance = instance
        self._run_id = run_id
        self._screen = screen
        self.title = title
        self._events = RunEvents(instance, run_id)
        self.planned_rows = 0
        """Rows of the work plan, once this run has made it."""

    def look(self) -> dg.DagsterRun | None:
        """Show new events. Return the run if it has ended."""
        run = self._instance.get_run_by_id(self._run_id)  # before the events, so that the last of them are shown
        for entry in self._events.read_new():
            self.planned_rows = rows_of_plan(entry) or self.planned_rows
            if line := describe(entry):
                self._screen.say(self.title, line)
        return run if run is not None and run.is_finished else None

    def recovery(self) -> FollowedRun | None:
        """Return the recovery of this run, once the sensor has requested it."""
        found = self._instance.get_runs(dg.RunsFilter(tags={RECOVERS_TAG: self._run_id}))
        if not found:
            return None
        self._screen.say(self.title, f"Dagster's recovery_sensor requested the recovery run {found[0].run_id}")
        return FollowedRun(self._instance, found[0].run_id, self._screen, self.title)


class Training:
    """One training run of the demo. A fault may end its Dagster run, and a recovery run resumes it."""

    def __init__(
        self, run: FollowedRun, live: LiveRun, screen: Screen, *, batch_size: int, faults: list[Fault]
    ) -> None:
        """`run` is the Dagster run that was submitted for it. After the last fault, another one resumes it."""
        self._run = run
        self._live = live
        self._screen = screen
        self._batch_size = batch_size
        self._faults = faults
        self._bar = screen.bars.add_task(run.title, total=None)
        self._steps = 0
        self._dead: dg.DagsterRun | None = None
        self._dead_at_s = 0.0

    def look(self) -> bool:
        """Show the progress, and strike if a fault is due. Return True if the training run has ended.

        Raises:
            TrainingFailed: its Dagster run failed before the last fault, or no recovery followed, or the recovery failed.
        """
        if self._dead is not None and not self._found_recovery(self._dead):
            return False
        ended = self._run.look()
        self._steps = -(-self._run.planned_rows // self._batch_size) or self._steps
        self._show_step()
        if ended is None:
            return False
        if self._faults and self._faults[-1].struck and RECOVERS_TAG not in ended.tags:
            self._dead, self._dead_at_s = ended, self._screen.passed_s()
            return False
        check_success(ended)
        return True

    def _show_step(self) -> None:
        step = self._live.step()
        self._screen.bars.update(self._bar, completed=step, total=self._steps or None)
        due = next((fault for fault in self._faults if not fault.struck), None)
        if due and self._steps and step >= due.at_share * self._steps and due.strike():
            due.struck = True
            self._screen.say(self._run.title, f"FAULT after step {step}: {due.name}", "red")

    def _found_recovery(self, dead: dg.DagsterRun) -> bool:
        """Look for the recovery run that the sensor requests. Follow it from now on, and return True, if it exists."""
        recovery = self._run.recovery()
        if recovery is not None:
            self._run, self._dead = recovery, None
        elif self._screen.passed_s() - self._dead_at_s > _RECOVERY_WITHIN_S:
            raise TrainingFailed(
                f"expected the sensor to request a recovery of run {dead.run_id} within {_RECOVERY_WITHIN_S:.0f} s, "
                "found none"
            )
        return recovery is not None


def check_success(run: dg.DagsterRun) -> None:
    """Check that a Dagster run succeeded.

    Raises:
        TrainingFailed: it ended otherwise.
    """
    if run.status != dg.DagsterRunStatus.SUCCESS:
        raise TrainingFailed(
            f"expected Dagster run {run.run_id} of {run.job_name!r} to succeed, found {run.status.value}"
        )
