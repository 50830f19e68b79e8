"""The main job on real input, through Dagster, with faults: `python -m examples.demo.main_job` (`make demo`).

1. Ingest and tokenize the standard library's sources.
2. Train a reference run without faults, and the same plan as another run beside it. SIGKILL one of its ranks in the middle
   of a step: the supervisor recovers. SIGKILL the Dagster run's own process: the trainer exits, the sensor requests the
   recovery job, which finishes the run.
3. Audit both, compare their losses bit by bit, and write the report.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import dagster as dg
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlac_pipeline.dagster.training_runs import model_key, plan_key
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import BadInput, DlacError, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
from dlac_pipeline.spec.job_spec import JobSpec, read_spec
from examples.demo.live_run import LiveRun
from examples.demo.local_dagster import WORKSPACE, LocalDagster
from examples.demo.report import write_report
from examples.demo.runs import Fault, FollowedRun, Screen, Training, check_success

REFERENCE, FAULTY = "demo-reference", "demo-faulty"
JOB = Path(__file__).resolve().parent.parent / "gpt" / "job.toml"
MARKER = ".dlac-demo"
"""Written into the demo's home: only a folder that has it is ever emptied."""
KILL_RANK_AT, KILL_DAGSTER_RUN_AT = 0.3, 0.6
"""Share of the run's steps after which each fault strikes."""
_LOOK_S = 0.25
_WITHIN_S = 1800.0
"""Seconds for each part of the demo, on a machine that is much slower than a laptop."""
_AUDITED = ("checkpoints", "recoveries", "rows_live", "rows_consumed", "rows_duplicated", "rows_missing", "exact")
"""Figures of an audit that the demo shows. `dlac audit` shows all of them."""
_Found = TypeVar("_Found")


class Demo:
    """One demo in one home folder."""

    def __init__(self, home: Path, report: Path, console: Console, *, catalog: str | None, store: str) -> None:
        """`catalog` and `store` are the places of tables and of checkpoints, or None and "" for the home folder."""
        variables = {} if catalog is None else {"DLAC_CATALOG": catalog}
        self._dagster = LocalDagster(home, variables=variables)
        os.environ["DLAC_HOME"] = str(self._dagster.home)
        self._report = report
        self._console = console
        self._screen = Screen(console)
        job = read_spec(JOB)
        places = {
            "lakehouse": LakehouseConfig(name=catalog),
            "checkpoint": job.checkpoint.model_copy(update={"store": store}),
        }
        self._spec = job.model_copy(update=places).resolved(self._dagster.home)
        self._timings: dict[str, float] = {}

    def run(self) -> bool:
        """Run all of it. Return True if everything that it must show held."""
        self._screen.say("demo", f"Dagster starts, with its storage and the lakehouse in {self._dagster.home}")
        for name in (REFERENCE, FAULTY):
            self._dagster.write_job_file(self._named(name))
        with self._dagster.running(), self._dagster.instance() as instance, self._screen.bars:
            began = self._screen.passed_s()
            self._ingest(instance)
            self._timings["ingest_and_tokenize_s"] = self._screen.passed_s() - began
            began = self._screen.passed_s()
            self._train(instance)
            self._timings["train_both_runs_s"] = self._screen.passed_s() - began
        self._timings["total_s"] = self._screen.passed_s()
        runs = {"reference": REFERENCE, "faulty": FAULTY}
        report = write_report(connect(self._spec.lakehouse), runs, self._report, self._timings)
        self._print(report)
        return bool(report["ok"])

    def _named(self, name: str) -> JobSpec:
        return self._spec.model_copy(update={"run": name})

    def _ingest(self, instance: dg.DagsterInstance) -> None:
        run = self._submit(instance, [dg.AssetKey("corpus"), dg.AssetKey("tokens")], "ingest")
        check_success(_wait_for(run.look))

    def _train(self, instance: dg.DagsterInstance) -> None:
        """Train both runs side by side, because a run that recovers leaves a part of the processors idle."""
        live = LiveRun(self._spec.checkpoint.local, FAULTY)
        faults = [
            Fault("SIGKILL of rank 1 in the middle of a step", KILL_RANK_AT, lambda: live.kill_rank(1)),
            Fault("SIGKILL of the process of the Dagster run", KILL_DAGSTER_RUN_AT, live.kill_dagster_run),
        ]
        trainings = [
            self._training(instance, REFERENCE, "reference", []),
            self._training(instance, FAULTY, "with faults", faults),
        ]
        _wait_for(lambda: sum(training.look() for training in trainings) == len(trainings))  # each of them looks

    def _training(self, instance: dg.DagsterInstance, name: str, title: str, faults: list[Fault]) -> Training:
        spec = self._named(name)
        return Training(
            self._submit(instance, [plan_key(name), model_key(name)], title),
            LiveRun(spec.checkpoint.local, name),
            self._screen,
            batch_size=spec.order.batch_size,
            faults=faults,
        )

    def _submit(self, instance: dg.DagsterInstance, assets: list[dg.AssetKey], title: str) -> FollowedRun:
        """Materialize assets, as the button in the UI does."""
        from jobs.definitions import defs  # reads the job files in $DLAC_HOME

        run_id = self._dagster.materialize(instance, defs, assets)
        names = ", ".join(key.to_user_string() for key in assets)
        self._screen.say(title, f"{names}: queued as Dagster run {run_id}")
        return FollowedRun(instance, run_id, self._screen, title)

    def _print(self, report: Mapping[str, Any]) -> None:
        self._console.print(_audits(report["audits"]), _recoveries(report["recoveries"]))
        verdict = "[green]holds[/]" if report["ok"] else "[red]does not hold[/]"
        home, embedded = self._dagster.home, not self._spec.lakehouse.is_named
        commands = f"  dlac audit {FAULTY} --home {home}\n  dlac status {FAULTY} --home {home}\n" if embedded else ""
        self._console.print(
            f"Losses of both runs are bit-identical at {report['steps_compared']} steps: {report['losses_identical']}.\n"
            f"Everything that the demo must show {verdict}. It took {self._screen.passed_s():.0f} s.\n\n"
            "Where to look next:\n"
            f"  {self._report / 'report.html'}   losses, coverage and recoveries, with plots\n"
            f"{commands}"
            "  make ui   these runs in Dagster, if the demo ran in its default folder",
            highlight=False,
            soft_wrap=True,
        )


def _wait_for(look: Callable[[], _Found | None]) -> _Found:
    """Look until something is found.

    Raises:
        TrainingFailed: nothing is found in time.
    """
    deadline = time.monotonic() + _WITHIN_S
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TrainingFailed(
                f"expected each part of the demo to end within {_WITHIN_S:.0f} s, found one that did not"
            )
        time.sleep(_LOOK_S)
    return found


def _audits(audits: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("", *audits, title="Audits", title_justify="left")
    for name in _AUDITED:
        table.add_row(name.replace("_", " "), *(_cell(audit[name]) for audit in audits.values()))
    return table


def _recoveries(recoveries: list[dict[str, Any]]) -> Table:
    columns = ("cause", "noticed by", "resumed at step", "rows trained again", "seconds")
    table = Table(*columns, title="Recoveries of the run with faults", title_justify="left")
    for found in recoveries:
        took_s = Recovery(**found).recovered_s
        row = (found["cause"], found["noticed_by"], found["resumed_step"], found["rows_replayed"], f"{took_s:.1f}")
        table.add_row(*(_cell(value) for value in row))
    return table


def _cell(value: object) -> str:
    return (
        {True: "yes", False: "NO"}[value]
        if isinstance(value, bool)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    home: Annotated[
        Path, typer.Option(help="Folder of the demo's lakehouse; one of an earlier demo is emptied first.")
    ] = Path("demo-lakehouse"),
    report: Annotated[Path, typer.Option(help="Folder of report.json and report.html.")] = Path("demo-report"),
    catalog: Annotated[
        str | None, typer.Option(help="Catalog of the tables, by its name in PyIceberg's configuration.")
    ] = None,
    store: Annotated[str, typer.Option(help="Address of the checkpoint store, such as s3://bucket/checkpoints.")] = "",
) -> None:
    """Run the main job on real input: plan, train, crash, recover, audit, report."""
    console = Console()
    try:
        check_checkout()
        empty_home(home)
        held = Demo(home, report, console, catalog=catalog, store=store).run()
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


if __name__ == "__main__":
    app()
