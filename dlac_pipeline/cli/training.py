"""Training: plan a job, train it, recover a run."""

import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.cli.display import TrainingDisplay, describe_outcome
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.spec.bounds import LONGEST_WAIT_S

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec
    from dlac_pipeline.spec.launch_request import Request

LAUNCH_OPTIONS = Door("dlac.launch_options", "kind of options")
"""An entry is a function of options, the environment, the launch section and the run. It returns settings of the section."""
TORCHRUN_PREFIX = "PET_"
"""Beginning of the names of torchrun's variables."""
app = typer.Typer()


@ui.command(app, ui.TRAIN, "dlac plan job.toml", "dlac plan job.toml --json")
def plan(spec: ui.SpecFile, home: ui.Home = None, as_json: ui.AsJson = False) -> None:
    """Pin the snapshot of the source table and write its work units to the lakehouse."""
    from dlac_pipeline.plan.legs.choice import plan_sources

    job = ui.resolved(spec, home)
    with ui.steps_bar() as bar:
        tasks = [bar.add_task(f"reading footers of {source.label}", total=None) for source in job.sources]

        def show(source: int, done: int, total: int) -> None:
            bar.update(tasks[source], completed=done, total=total)

        plans = plan_sources(ui.lakehouse_of(spec, home, create=True), job, progress=show)
    for each in plans:
        row = each.row
        facts = {"plan_id": row.plan_id, "table": row.source_table, "snapshot_id": row.snapshot_id, "tag": row.tag}
        counts = {"work_units": row.units, "rows": row.rows, "live_rows": row.live_rows, "bytes": row.bytes}
        ui.show_facts({**facts, **counts}, as_json=as_json)


@ui.command(
    app,
    ui.TRAIN,
    "dlac train job.toml",
    "dlac train job.toml --new-leg",
    "dlac train job.toml --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint node-1:29400",
    "dlac train job.toml --render",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(
    context: typer.Context,
    spec: ui.SpecFile,
    home: ui.Home = None,
    takeover: Annotated[
        bool, Option(help="Fence off a launch that is still alive. Without it, training is refused.")
    ] = False,
    plan_id: Annotated[
        list[str] | None,
        Option(help="Plan to train. Repeat the option for each source. Unset: plan the sources of the spec."),
    ] = None,
    new_leg: Annotated[
        bool, Option(help="Allow a changed spec: weights, exclusions, batch size, passes, steps, snapshot or order.")
    ] = False,
    nodes: Annotated[str | None, Option(help='Nodes that train the run together: "4", or "2:4" for 2 to 4.')] = None,
    rendezvous: Annotated[str | None, Option(help="host:port at which the nodes meet.")] = None,
    render: Annotated[
        bool, Option("--render", help="Print the job that the scheduler would get, and submit nothing.")
    ] = False,
) -> None:
    """Train a run to its end, from its last committed checkpoint. Ctrl-C stops it after a checkpoint.

    Options and PET_* variables of torchrun mean the same here: --nnodes, --nproc-per-node, --rdzv-endpoint, --rdzv-conf,
    --standalone, --max-restarts, --start-method, --shutdown-timeout, --numa-binding, --virtual-local-rank.

    With several nodes, start the same command on each of them. A node that gets SIGTERM exits, and the others continue. With
    launch.on = "slurm" or "kubernetes" this command submits one job and follows it. If it is stopped, it cancels the job.
    """
    from dlac_pipeline.spec.launch_request import Request

    job = ui.resolved(spec, home)
    environment = os.environ if job.launch.on == "here" else {}
    if context.args or any(name.startswith(TORCHRUN_PREFIX) for name in environment):
        read = LAUNCH_OPTIONS.load("torchrun", setting="the options of dlac train")
        job = _with_launch(job, read(context.args, environment, job.launch, job.run))
    options = {"new_leg": new_leg or None, "nodes": nodes, "rendezvous": rendezvous}
    job = _with_launch(job, {name: value for name, value in options.items() if value is not None})
    request = Request(spec=job, plan_ids=tuple(plan_id or ()), repin=True, takeover=takeover)
    if not render:
        _launch(request)
        return
    from dlac_pipeline.launchers.protocol import render_job

    ui.OUT.print(render_job(request), markup=False, highlight=False, soft_wrap=True)


def _with_launch(job: "JobSpec", options: dict[str, object]) -> "JobSpec":
    from dlac_pipeline.spec.job_spec import parse_spec

    return parse_spec({**job.model_dump(), "launch": {**job.launch.model_dump(), **options}}, origin="the command line")


@ui.command(
    app, ui.RECOVER, "dlac recover my-run", "dlac recover my-run --spec job.toml", "dlac recover my-run --wait-s 0"
)
def recover(
    run: ui.RunName,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    wait_s: Annotated[
        float,
        Option(
            help="Seconds that a live launch has to exit on its own.",
            min=0,
            max=LONGEST_WAIT_S,
            callback=ui.check_number,
        ),
    ] = 30.0,
) -> None:
    """Resume a run by its name, from the committed ledger. Older launches that may be alive are fenced off."""
    from dlac_pipeline.spec.launch_request import Request

    ledger = ui.ledger_of(spec, home)
    ledger.head_rows(run)  # a typo is to begin nothing
    _launch(Request(spec=ui.spec_of_run(run, spec, home, lakehouse=ledger.lakehouse), takeover=True, wait_s=wait_s))


def _launch(request: "Request") -> None:
    from dlac_pipeline.launchers.protocol import launcher_for
    from dlac_pipeline.launchers.signals import on_ending_signals, on_signals

    run = request.spec.run
    with TrainingDisplay(ui.OUT, run) as display:
        launcher = launcher_for(request, display.show)
        on_ending_signals(launcher.leave)  # of this node alone
        on_signals((signal.SIGINT,), launcher.stop)  # of the run
        outcome = launcher.run()
    ui.show_text(describe_outcome(run, outcome, attempt=display.attempt))
