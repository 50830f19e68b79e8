"""Training: begin a project, plan a job, train it, serve a rendezvous, recover a run."""

import os
import re
import shlex
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.cli.display import TrainingDisplay, describe_outcome
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.spec_problems import LONGEST_WAIT_S

if TYPE_CHECKING:
    from dlac_pipeline.operations.new_project import Trainable

app = typer.Typer()
_WILD = re.compile(r"[*?\[]")
_MODELS = {
    "tokens": "predicts each token from the one before",
    "text": "predicts each token of tokenizer.json from the one before",
}
_SHOWN_COLUMNS = 12


@ui.command(
    app,
    ui.TRAIN,
    "dlac init demo.points --columns x,y",
    "dlac init /data/points --run first",
    "dlac init 's3://bucket/pages/**/*.parquet' --table docs.pages --into pages",
    "dlac init docs.pages --catalog prod",
    "dlac init --add second",
)
def init(
    source: Annotated[
        str | None,
        Argument(
            help="Table, as namespace.table, or Parquet files: a folder, a bucket, a file or a pattern. With --add: the job "
            "file to copy, job.toml if unset."
        ),
    ] = None,
    into: Annotated[Path, Option(help="Folder of the new files. No file in it is overwritten.")] = Path(),
    run: Annotated[str | None, Option(help="Name of the run. Unset: that of the table.")] = None,
    columns: Annotated[
        str | None,
        Option(
            help="Columns to train on, as a,b. Unset: lists of integers, else documents, all numbers, or the longest text, "
            "without partition keys and ids. Of numbers, the last one is predicted, unset: label, target, y, class or outcome."
        ),
    ] = None,
    table: Annotated[
        str | None, Option(help="For Parquet files: the name of their table. Unset: lake and the name of the folder.")
    ] = None,
    catalog: Annotated[
        str | None, Option(help="Catalog, by its name in PyIceberg's configuration. Unset: the one in --home.")
    ] = None,
    add: Annotated[
        str | None,
        Option(help="Name of a second run: write its job file, a copy of the first one's, and its Dagster asset."),
    ] = None,
    home: ui.Home = None,
) -> None:
    """Write a job file, a training script and a Dagster project for a table, or for Parquet files in their place.

    Then train with them at once, and put your own model into train.py. A job file belongs to one run: a second experiment is a
    second file, which --add writes.
    """
    from dlac_pipeline.lakehouse.registration.register import register
    from dlac_pipeline.operations.new_project import check_free, find_trainable, write_project

    if add is not None:
        others = {"--run": run, "--columns": columns, "--table": table, "--catalog": catalog}
        if given := [name for name, value in others.items() if value is not None]:
            raise typer.BadParameter(f"expected --add without {given[0]}: edit the job file that it writes")
        _add_run(Path(source) if source else into / "job.toml", check_run_name(add), ui.place_options(None, home))
        return
    if source is None:
        raise typer.BadParameter("expected a table or Parquet files, found none: name one, or add a run with --add")
    files = _is_location(source)
    name = (table or _table_of(source)) if files else source
    named = re.sub(r"[^A-Za-z0-9._-]", "-", name.rpartition(".")[2]).lstrip("._-")[:100]
    run = check_run_name(run or named or "first")
    check_free(into, run)
    if files:
        lakehouse = ui.lakehouse_for_files(ui.config_of(home, catalog), name, source)
        done = register(lakehouse, name, source)
        typer.echo(f"registered {source} as table {name}", err=True)  # also if its columns are refused
        for column in done.left_out:
            typer.echo(f"left out column {ui.terminal_text(column)}", err=True)
    else:
        lakehouse = ui.lakehouse_of(None, home, create=catalog is not None, catalog=catalog)
    wanted = [each.strip() for each in columns.split(",")] if columns else []
    found = find_trainable(lakehouse, name, wanted)
    written = write_project(into, run, found, {} if catalog is None else {"name": catalog})
    ui.show_text(f"wrote {', '.join(written)}")
    _show_choice(found)
    _show_next(run, into / "job.toml", ui.place_options(None, home))


def _show_choice(found: "Trainable") -> None:
    """Show the columns of a generated script, those that it leaves out, and how to choose others."""
    *features, target = found.columns
    loss = f"{found.classes} classes, by cross entropy" if found.classes else "a quantity, by squared error"
    model = f"predicts {target} ({loss}) from {'the others' if features else 'itself, for want of others'}"
    ui.show_text(f"train.py reads {_listed(found.columns)} of {found.table}, and {_MODELS.get(found.kind, model)}")
    if found.filtered is not None:
        ui.show_text(f"rows without {found.filtered} are left out, by source.row_filter")
    if found.left_out:
        ui.show_text(f"left out: {_listed([f'{name} ({why})' for name, why in found.left_out.items()])}")
    ui.show_text(
        "to change that: --columns a,b with another --into (of numbers, the last one is predicted), or source.columns in "
        "job.toml and train.py. source.transform converts columns of other types"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_COLUMNS
    return ", ".join(names[:_SHOWN_COLUMNS]) + (f" and {more} more" if more > 0 else "")


def _add_run(job_file: Path, run: str, options: tuple[str, ...]) -> None:
    from dlac_pipeline.operations.new_project import add_run

    written = add_run(job_file, run)
    ui.show_text(f"wrote {', '.join(written)}, after {job_file}")
    _show_next(run, job_file.with_name(f"{run}{job_file.suffix}"), options)


def _is_location(source: str) -> bool:
    """Return True for files, False for a name such as namespace.table. Raise `SpecInvalid` if it is neither."""
    if "/" in source or _WILD.search(source) or source.endswith(".parquet") or Path(source).exists():
        return True
    if "." in source:
        return False
    raise SpecInvalid(
        f"expected a table as namespace.table, or a folder or bucket of Parquet files, found {source!r}, and no such folder: "
        "correct the path, or write the namespace before the table"
    )


def _table_of(location: str) -> str:
    """Return the name of a table after the last folder of a location without wildcards, or its file."""
    wild = _WILD.search(location)
    place = location[: location.rfind("/", 0, wild.start())] if wild else location
    last = place.rstrip("/").rpartition("/")[2] if "://" in place else Path(place).absolute().name
    return f"lake.{re.sub(r'[^A-Za-z0-9_]', '_', last.removesuffix('.parquet'))}"


def _show_next(run: str, job_file: Path, options: tuple[str, ...]) -> None:
    given = "".join(f" {shlex.quote(option)}" for option in options)
    home = f"DLAC_HOME={shlex.quote(str(Path(options[1]).absolute()))} " if options else ""
    ui.show_text("next:")
    ui.show_text(f"    dlac train {shlex.quote(str(job_file))}{given}")
    ui.show_text(f"    dlac audit {run}{given}")
    ui.show_text(f"    {home}dagster dev -w {shlex.quote(str(job_file.with_name('workspace.yaml')))}")


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
    from dlac_pipeline.elastic.torchrun_options import are_given, launch_settings

    job = ui.resolved(spec, home)
    environment = os.environ if job.launch.on == "here" else {}
    if are_given(context.args, environment):
        job = _with_launch(job, launch_settings(context.args, environment, job.launch, job.run))
    options = {"new_leg": new_leg or None, "nodes": nodes, "rendezvous": rendezvous}
    job = _with_launch(job, {name: value for name, value in options.items() if value is not None})
    request = Request(spec=job, plan_ids=tuple(plan_id or ()), repin=True, takeover=takeover)
    if not render:
        _launch(request)
        return
    from dlac_pipeline.launchers.protocol import render_job

    ui.OUT.print(render_job(request), markup=False, highlight=False, soft_wrap=True)


@ui.command(app, ui.TRAIN, "dlac rendezvous node-1:29400")
def rendezvous(address: Annotated[str, Argument(help="host:port, the same address as on the nodes of a run.")]) -> None:
    """Serve the rendezvous of runs on several nodes, on a node that outlives them. SIGTERM or Ctrl-C ends it.

    Without this command one of the nodes serves it, and the others cannot meet while that node is unavailable.
    """
    from dlac_pipeline.elastic.endpoint import serve_rendezvous
    from dlac_pipeline.launchers.orchestrator import on_signals

    stop = threading.Event()
    on_signals((signal.SIGINT, signal.SIGTERM), stop.set)
    serve_rendezvous(address, stop, lambda: ui.show_text(f"serving the rendezvous at {address}"))


def _with_launch(job: JobSpec, options: dict[str, object]) -> JobSpec:
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
    ledger = ui.ledger_of(spec, home)
    ledger.head_rows(run)  # a typo is to begin nothing
    _launch(Request(spec=ui.spec_of_run(run, spec, home, lakehouse=ledger.lakehouse), takeover=True, wait_s=wait_s))


def _launch(request: Request) -> None:
    from dlac_pipeline.launchers.orchestrator import on_ending_signals, on_signals
    from dlac_pipeline.launchers.protocol import launcher_for

    run = request.spec.run
    with TrainingDisplay(ui.OUT, run) as display:
        launcher = launcher_for(request, display.show)
        on_ending_signals(launcher.leave)  # of this node alone
        on_signals((signal.SIGINT,), launcher.stop)  # of the run
        outcome = launcher.run()
    ui.show_text(describe_outcome(run, outcome, attempt=display.attempt))
