"""Runs: plan, train, recover, and where they are."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlac_pipeline.audit.wording import TableColumn, format_age, lay_out_facts
from dlac_pipeline.cli.display import TrainingDisplay, command_with, describe_outcome, describe_status, watch_run
from dlac_pipeline.cli.shared import (
    LOOK,
    OUT,
    RECOVER,
    TRAIN,
    AsJson,
    Home,
    RunName,
    SpecFile,
    SpecOption,
    check_number,
    examples,
    lakehouse_of,
    place_options,
    resolved,
    show_facts,
    show_lines,
    show_table,
    spec_of_run,
    steps_bar,
)
from dlac_pipeline.lakehouse.plain_json import strict_json
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.spec_problems import LONGEST_WAIT_S

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.ledger.plans import PlanRow

app = typer.Typer()


@app.command(rich_help_panel=TRAIN, epilog=examples("dlac plan job.toml", "dlac plan job.toml --json"))
def plan(spec: SpecFile, home: Home = None, as_json: AsJson = False) -> None:
    """Pin the snapshot of the source table and write its work units down."""
    from dlac_pipeline.lakehouse.iceberg.connect import connect
    from dlac_pipeline.plan.legs.choice import plan_sources

    job = resolved(spec, home)
    with steps_bar() as bar:
        tasks = [bar.add_task(f"reading footers of {source.label}", total=None) for source in job.sources]

        def show(source: int, done: int, total: int) -> None:
            bar.update(tasks[source], completed=done, total=total)

        plans = plan_sources(connect(job.lakehouse), job, progress=show)
    for each in plans:
        show_facts(_facts_of_plan(each.row), as_json=as_json)


def _facts_of_plan(row: PlanRow) -> dict[str, object]:
    return {
        "plan_id": row.plan_id,
        "table": row.source_table,
        "snapshot_id": row.snapshot_id,
        "tag": row.tag,
        "work_units": row.units,
        "rows": row.rows,
        "live_rows": row.live_rows,
        "bytes": row.bytes,
    }


@app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "dlac train job.toml",
        "dlac train job.toml --new-leg",
        "dlac train job.toml --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint node-1:29400",
        "dlac train job.toml --render",
    ),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(
    context: typer.Context,
    spec: SpecFile,
    home: Home = None,
    takeover: Annotated[
        bool, typer.Option(help="Fence off a launch that is still alive, instead of being refused.")
    ] = False,
    plan_id: Annotated[
        list[str] | None,
        typer.Option(help="Train this plan, or one for each source; unset: plan the sources of the spec."),
    ] = None,
    new_leg: Annotated[
        bool,
        typer.Option(
            help="Allow the spec to change weights, exclusions, batch size, passes, steps, snapshot or order from here on."
        ),
    ] = False,
    nodes: Annotated[str | None, typer.Option(help='Nodes that train it together: "4", or "2:4" for 2 to 4.')] = None,
    rendezvous: Annotated[str | None, typer.Option(help="host:port at which they meet.")] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Print the job that the scheduler would get, and submit nothing.")
    ] = False,
) -> None:
    """Train a run to its end, from its last committed checkpoint. Ctrl-C stops it after a checkpoint.

    Options and PET_* variables of torchrun mean the same here: --nnodes, --nproc-per-node, --rdzv-endpoint, --rdzv-conf,
    --standalone, --max-restarts, --start-method, --shutdown-timeout, --numa-binding, --virtual-local-rank.

    With several nodes, start the same command on each of them. A node that gets SIGTERM leaves the run to the others. With
    launch.on = "slurm" or "kubernetes" one job is submitted, followed from here, and cancelled with this command.
    """
    job = _with_torchrun_options(resolved(spec, home), context.args)
    asked = {"new_leg": new_leg or None, "nodes": nodes, "rendezvous": rendezvous}
    job = _with_launch(job, {name: value for name, value in asked.items() if value is not None})
    request = Request(spec=job, plan_ids=tuple(plan_id or ()), repin=True, takeover=takeover)
    if not render:
        _launch(request)
        return
    from dlac_pipeline.launchers.protocol import render_job

    OUT.print(render_job(request), markup=False, highlight=False, soft_wrap=True)


@app.command(rich_help_panel=TRAIN, epilog=examples("dlac rendezvous node-1:29400"))
def rendezvous(
    address: Annotated[str, typer.Argument(help="host:port; the same address as on the nodes of a run.")],
) -> None:
    """Serve the rendezvous of runs on several nodes, on a node that outlives them. SIGTERM or Ctrl-C ends it.

    Without this command one of the nodes serves it, and the others cannot meet while that node is unavailable.
    """
    from dlac_pipeline.elastic.endpoint import serve_rendezvous
    from dlac_pipeline.launchers.signals import on_signals

    stop = threading.Event()
    on_signals((signal.SIGINT, signal.SIGTERM), stop.set)
    serve_rendezvous(address, stop, lambda: OUT.print(f"serving the rendezvous at {address}", markup=False))


def _with_torchrun_options(job: JobSpec, options: list[str]) -> JobSpec:
    from dlac_pipeline.elastic.torchrun_options import are_given, launch_settings

    environment = os.environ if job.launch.on == "here" else {}
    if not are_given(options, environment):
        return job
    return _with_launch(job, launch_settings(options, environment, job.launch, job.run))


def _with_launch(job: JobSpec, asked: dict[str, object]) -> JobSpec:
    """The job spec with settings of its launch replaced."""
    return parse_spec({**job.model_dump(), "launch": {**job.launch.model_dump(), **asked}}, origin="the command line")


@app.command(
    rich_help_panel=RECOVER,
    epilog=examples("dlac recover my-run", "dlac recover my-run --spec job.toml", "dlac recover my-run --wait-s 0"),
)
def recover(
    run: RunName,
    home: Home = None,
    spec: SpecOption = None,
    wait_s: Annotated[
        float,
        typer.Option(
            help="Seconds that a live launch has to exit on its own.",
            min=0,
            max=LONGEST_WAIT_S,
            callback=check_number,
        ),
    ] = 30.0,
) -> None:
    """Resume a run by its name, from the committed ledger. Older launches that may be alive are fenced off."""
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    lakehouse = lakehouse_of(spec, home)
    Ledger(lakehouse).head_rows(run)  # a typo is to begin nothing
    _launch(Request(spec=spec_of_run(run, spec, home, lakehouse=lakehouse), takeover=True, wait_s=wait_s))


@app.command(
    rich_help_panel=LOOK,
    epilog=examples("dlac status my-run", "dlac status my-run --watch", "dlac status my-run --json"),
)
def status(
    run: RunName,
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Look again each second, until the run is finished or Ctrl-C; not in a terminal: a JSON line each.",
        ),
    ] = False,
    every_s: Annotated[
        float,
        typer.Option(help="Seconds between two looks of --watch.", min=0.1, max=LONGEST_WAIT_S, callback=check_number),
    ] = 1.0,
) -> None:
    """Show the state of a run: step, loss, last checkpoint, attempt, exclusions of rewinds.

    With --watch also its present work.
    """
    options = place_options(spec, home)
    if watch:
        watch_run(lambda: lakehouse_of(spec, home), run, OUT, every_s=every_s, as_json=as_json, options=options)
        return
    from dlac_pipeline.operations.status import run_status

    facts = run_status(lakehouse_of(spec, home), run)
    if as_json:
        show_facts({**facts, "next_command": command_with(facts["next_command"], options)}, as_json=True)
        return
    show_lines(lay_out_facts(describe_status(facts, options), OUT.width))


@app.command(rich_help_panel=LOOK, epilog=examples("dlac runs", "dlac runs --json"))
def runs(home: Home = None, spec: SpecOption = None, as_json: AsJson = False) -> None:
    """List the runs of a lakehouse, the one that committed last first: state, step, last checkpoint, attempts."""
    from dlac_pipeline.operations.status import list_runs

    found = list_runs(lakehouse_of(spec, home))
    if as_json:
        sys.stdout.write(strict_json(found) + "\n")
        return
    columns = (
        TableColumn(name="run", long=True),
        TableColumn(name="state"),
        TableColumn(name="step", right=True),
        TableColumn(name="checkpoint"),
        TableColumn(name="attempts", right=True),
    )
    show_table(columns, [_row_of_run(each) for each in found], empty="no run yet: `dlac train SPEC` starts one")


def _row_of_run(facts: Mapping[str, Any]) -> tuple[str, ...]:
    total = facts["total_steps"]
    step = f"{facts['step']:,}" + (f"/{total:,}" if total else "")
    committed = format_age(facts["head_committed_at"]) or "none yet"
    return facts["run"], facts["launch"], step, committed, f"{facts['attempts']:,}"


def _launch(request: Request) -> None:
    from dlac_pipeline.launchers.protocol import launcher_for
    from dlac_pipeline.launchers.signals import on_ending_signals, on_signals

    run = request.spec.run
    with TrainingDisplay(OUT, run) as display:
        launcher = launcher_for(request, display.show)
        on_ending_signals(launcher.leave)  # this machine's
        on_signals((signal.SIGINT,), launcher.stop)  # a person's
        outcome = launcher.run()
    OUT.print(describe_outcome(run, outcome, attempt=display.attempt), markup=False, soft_wrap=True)
