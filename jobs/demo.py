"""The main job on real input, through Dagster, with faults: `python -m jobs.demo` (`make demo`, `dlac demo`).

1. Ingest and tokenize the standard library's sources. Train a reference run without faults.
2. Train the same plan again as another run. SIGKILL one of its ranks in the middle of a step: the supervisor recovers.
   SIGKILL the Dagster run's own process: the trainer exits, the sensor requests the recovery job, which finishes the run.
3. Audit both, compare their losses bit by bit, and write the report.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.report import write_report
from dlac_pipeline.audit.table import audit_table
from dlac_pipeline.dagster.sensors.continual import run_config_of
from dlac_pipeline.lakehouse.errors import BadInput, DlacError, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import JobSpec, read_spec
from jobs.local_dagster import WORKSPACE, LiveRun, LocalDagster

REFERENCE, FAULTY = "demo-reference", "demo-faulty"
JOB = Path(__file__).resolve().parent.parent / "examples" / "gpt" / "job.toml"
MARKER = ".dlac-demo"
"""Written into the demo's home: only a folder that has it is ever emptied."""
KILL_RANK_AT, KILL_DAGSTER_RUN_AT = 0.3, 0.6
"""Share of the run's steps after which each fault strikes."""


@dataclass(slots=True)
class Fault:
    """Something that is done once to a run, from a step on."""

    name: str
    at_step: int
    strike: Callable[[], bool]
    struck: bool = False


@dataclass(slots=True)
class Stage:
    """One line of the display: a Dagster run that is waited for."""

    progress: Progress
    task: TaskID
    live: LiveRun | None = None
    faults: list[Fault] = field(default_factory=list)

    def tick(self) -> None:
        """Show the progress, and inject the fault that is due."""
        step = 0 if self.live is None else self.live.step()
        self.progress.update(self.task, completed=step)
        for fault in self.faults:
            if not fault.struck and step >= fault.at_step:
                fault.struck = fault.strike()
                if fault.struck:
                    self.progress.console.print(f"  [red]fault[/] at step {step}: {fault.name}", highlight=False)
            if not fault.struck:
                break


class Demo:
    """One demo in one home folder."""

    def __init__(self, home: Path, report: Path, console: Console) -> None:
        self._dagster = LocalDagster(home)
        self._report = report
        self._console = console
        self._spec = read_spec(JOB).resolved(self._dagster.home)
        self._timings: dict[str, float] = {}

    def run(self) -> bool:
        """Run all of it. Return True if everything that it must show held."""
        started = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed}"),
            TimeElapsedColumn(),
        )
        with self._dagster.running(), Progress(*columns, console=self._console) as progress:
            self._expect_success(progress, "ingest and tokenize", "ingest_job", {})
            self._expect_success(progress, "train the reference run", "train_job", self._config(REFERENCE), REFERENCE)
            self._faulty(progress)
        self._timings["total_s"] = time.monotonic() - started
        lakehouse = connect(self._spec.lakehouse)
        runs = {"reference": REFERENCE, "faulty": FAULTY}
        report = write_report(lakehouse, runs, self._report, self._timings)
        for run in runs.values():
            self._console.print(audit_table(audit_run(lakehouse, run)))
        self._print(report)
        return bool(report["ok"])

    def _faulty(self, progress: Progress) -> None:
        live = LiveRun(self._spec.checkpoint.local, FAULTY)
        steps = self._steps_of_reference()
        faults = [
            Fault("rank 1 is killed in the middle of a step", int(steps * KILL_RANK_AT), lambda: live.kill_rank(1)),
            Fault("the Dagster run's process is killed", int(steps * KILL_DAGSTER_RUN_AT), live.kill_dagster_run),
        ]
        run = self._follow(progress, "train with faults", "train_job", self._config(FAULTY), FAULTY, faults)
        if run.status != dg.DagsterRunStatus.FAILURE or not all(fault.struck for fault in faults):
            raise TrainingFailed(f"expected the Dagster run to die of the second fault, found {run.status.value}")
        recovery = self._dagster.recovery_of(run.run_id)
        self._console.print(f"  the sensor requested recovery run {recovery}", highlight=False)
        stage = Stage(progress, progress.add_task("recover", total=steps), live)
        ended = self._dagster.wait(recovery, while_waiting=stage.tick)
        stage.tick()
        _check_success(ended)

    def _steps_of_reference(self) -> int:
        return audit_run(connect(self._spec.lakehouse), REFERENCE).step

    def _config(self, run: str) -> dict[str, Any]:
        spec: JobSpec = self._spec.model_copy(update={"run": run})
        return run_config_of(spec)

    def _expect_success(
        self, progress: Progress, title: str, job: str, config: dict[str, Any], run: str | None = None
    ) -> None:
        _check_success(self._follow(progress, title, job, config, run, []))

    def _follow(
        self, progress: Progress, title: str, job: str, config: dict[str, Any], run: str | None, faults: list[Fault]
    ) -> dg.DagsterRun:
        started = time.monotonic()
        live = None if run is None else LiveRun(self._spec.checkpoint.local, run)
        stage = Stage(progress, progress.add_task(title, total=None), live, faults)
        ended = self._dagster.wait(self._dagster.launch(job, config), while_waiting=stage.tick)
        stage.tick()
        progress.stop_task(stage.task)
        self._timings[f"{title.replace(' ', '_')}_s"] = time.monotonic() - started
        return ended

    def _print(self, report: dict[str, Any]) -> None:
        verdict = "[green]holds[/]" if report["ok"] else "[red]does not hold[/]"
        self._console.print(
            f"losses of both runs bit-identical at {report['steps_compared']} steps: {report['losses_identical']}\n"
            f"everything that the demo must show {verdict}; total {self._timings['total_s']:.0f} s; "
            f"report: {self._report / 'report.html'}",
            highlight=False,
        )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    home: Annotated[
        Path, typer.Option(help="Folder of the demo's lakehouse; one of an earlier demo is emptied first.")
    ] = Path("demo-lakehouse"),
    report: Annotated[Path, typer.Option(help="Folder of report.json and report.html.")] = Path("demo-report"),
) -> None:
    """Run the main job on real input: plan, train, crash, recover, audit, report."""
    console = Console()
    try:
        check_checkout()
        empty_home(home)
        held = Demo(home, report, console).run()
    except DlacError as err:
        console.print(Text.assemble(("error:", "red"), f" {type(err).__name__}: {err}"), soft_wrap=True)
        sys.exit(err.exit_code)
    sys.exit(0 if held else 1)


def check_checkout() -> None:
    """Check for a checkout: the demo trains the example on Dagster's workspace file, and an installed package has neither.

    Raises:
        BadInput: they do not exist.
    """
    for needed in (JOB, WORKSPACE):
        if not needed.is_file():
            raise BadInput(f"expected {str(needed)!r}, found no such file: run the demo in a checkout of DLAC")


def empty_home(home: Path) -> None:
    """Make `home` an empty folder that is marked as the demo's own.

    Raises:
        SpecInvalid: it holds something, and not from an earlier demo.
    """
    if home.exists() and not (home / MARKER).is_file() and (not home.is_dir() or any(home.iterdir())):
        raise SpecInvalid(
            f"expected a new, an empty or an earlier demo's folder (one with {MARKER}), found {str(home)!r}, which is "
            "none of these: name another with --home, or delete it yourself"
        )
    if home.exists():
        shutil.rmtree(home)
    home.mkdir(parents=True)
    (home / MARKER).touch()


def _check_success(run: dg.DagsterRun) -> None:
    if run.status != dg.DagsterRunStatus.SUCCESS:
        raise TrainingFailed(
            f"expected Dagster run {run.run_id} of {run.job_name!r} to succeed, found {run.status.value}"
        )


if __name__ == "__main__":
    app()
