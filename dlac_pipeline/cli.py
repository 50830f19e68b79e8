"""The `dlac` command: plan, train, recover, look, audit. Errors come as one line and the exit status of their class."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from catalog.connect import Lakehouse, LakehouseConfig, connect
from catalog.errors import BadInput, DlacError, NoSuchRun, SpecInvalid
from catalog.ledger import Ledger
from catalog.plans import PlanRow
from dlac_pipeline.spec import JobSpec, home_folder, parse_spec, read_spec
from dlac_pipeline.watch import TrainingDisplay

app = typer.Typer(
    name="dlac",
    help="Train from Iceberg tables, with data consumption committed in the lakehouse together with every checkpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_out, _err = Console(), Console(stderr=True)

Home = Annotated[
    Path | None,
    typer.Option(
        "--home", help="Folder of the embedded lakehouse and store.", envvar="DLAC_HOME", show_default=".dlac"
    ),
]
SpecFile = Annotated[Path, typer.Argument(help="Job spec, a .toml or .yaml file.")]
SpecOption = Annotated[
    Path | None, typer.Option("--spec", help="Job spec that names the lakehouse, when it is not the embedded one.")
]
RunName = Annotated[str, typer.Argument(help="Name of the training run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def _print_version(asked: bool) -> None:
    if asked:
        _out.print(f"dlac {version_of('dlac')}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What all commands share; the help is the app's."""


@app.command()
def plan(spec: SpecFile, home: Home = None, as_json: AsJson = False) -> None:
    """Pin the snapshot of the source table and write its work units down."""
    from dlac_pipeline.plan.planner import make_plan

    job = _resolved(spec, home)
    lakehouse = connect(job.lakehouse)
    rows = []
    with _bar() as bar:
        for source in job.sources:
            task = bar.add_task(f"reading footers of {source.label}", total=None)
            made = make_plan(
                lakehouse,
                source,
                progress=lambda done, total, task=task: bar.update(task, completed=done, total=total),  # type: ignore[misc]  # a default binds the loop's value
            )
            rows.append(made.row)
    for row in rows:
        _show_facts(_facts_of_plan(row), as_json=as_json)


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


@app.command()
def train(
    spec: SpecFile,
    home: Home = None,
    takeover: Annotated[
        bool, typer.Option(help="Fence off a launch that is still alive, instead of being refused.")
    ] = False,
    plan_id: Annotated[
        list[str] | None,
        typer.Option(help="Train this plan, or one for each source; unset: plan the sources as the spec says."),
    ] = None,
    new_leg: Annotated[
        bool,
        typer.Option(help="Allow the spec to change weights, exclusions, batch size, passes or snapshot from here on."),
    ] = False,
) -> None:
    """Train a run to its end; resumes it where its last committed checkpoint is. Ctrl-C stops it behind a checkpoint."""
    job = _resolved(spec, home)
    if new_leg:
        job = job.model_copy(update={"launch": job.launch.model_copy(update={"new_leg": True})})
    _supervise(job, takeover=takeover, plan_ids=tuple(plan_id or ()), repin=True, wait_s=0.0)


@app.command()
def recover(
    run: RunName,
    home: Home = None,
    spec: SpecOption = None,
    wait_s: Annotated[float, typer.Option(help="Seconds to let a launch that is still alive leave by itself.")] = 30.0,
) -> None:
    """Resume a run by its name, from the committed ledger; fences off whatever may still be alive of it."""
    job = _resolved(spec, home) if spec is not None else _last_spec(_lakehouse(None, home), run)
    _supervise(job, takeover=True, plan_ids=(), repin=False, wait_s=wait_s)


@app.command()
def status(run: RunName, home: Home = None, spec: SpecOption = None, as_json: AsJson = False) -> None:
    """Where a run is: step, loss, last checkpoint, attempt."""
    from dlac_pipeline.recover.status import run_status

    _show_facts(run_status(_lakehouse(spec, home), run), as_json=as_json)


@app.command()
def checkpoints(run: RunName, home: Home = None, spec: SpecOption = None, as_json: AsJson = False) -> None:
    """The checkpoints of a run: step, age, size, and whether they are kept, retired or damaged."""
    from dlac_pipeline.checkpoint.listing import list_checkpoints

    listed = list_checkpoints(_lakehouse(spec, home), run)
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in listed], default=str) + "\n")
        return
    table = Table("step", "checkpoint", "committed", "size", "attempt", "tiers", "state", "names")
    for each in listed:
        size = "" if each.bytes is None else decimal(each.bytes)
        tiers = " ".join(each.tiers)
        facts = (
            each.step,
            each.checkpoint_id,
            _ago(each.committed_at),
            size,
            each.attempt,
            tiers,
            each.state,
            " ".join(each.names),
        )
        table.add_row(*(Text(str(fact)) for fact in facts))
    _out.print(table)


@app.command()
def name(
    run: RunName,
    name: Annotated[str, typer.Argument(help="The name.")],
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint; unset: the head.")] = None,
    home: Home = None,
    spec: SpecOption = None,
) -> None:
    """Name a checkpoint: retention keeps it until the name is taken away, whatever the job spec says."""
    from catalog.commits import name_checkpoint

    checkpoint_id = name_checkpoint(Ledger(_lakehouse(spec, home)), run, name, step=step)
    _out.print(f"checkpoint {checkpoint_id} is named {name}", markup=False)


@app.command()
def unname(
    run: RunName,
    name: Annotated[str, typer.Argument(help="The name.")],
    home: Home = None,
    spec: SpecOption = None,
) -> None:
    """Take the name of a checkpoint away: retention treats it as any other then."""
    from catalog.commits import unname_checkpoint

    checkpoint_id = unname_checkpoint(Ledger(_lakehouse(spec, home)), run, name)
    _out.print(f"checkpoint {checkpoint_id} is not named {name} any more", markup=False)


@app.command()
def verify(
    run: RunName,
    home: Home = None,
    spec: SpecOption = None,
    step: Annotated[
        int | None, typer.Option(help="Only the checkpoint of this step; unset: every one that is kept.")
    ] = None,
) -> None:
    """Read the files of a run's checkpoints again and compare their digests; exit status 0 only if all hold."""
    from dlac_pipeline.checkpoint.listing import verify_checkpoints
    from dlac_pipeline.checkpoint.store import tiers_of

    damaged = False
    files = None if spec is None else tiers_of(_resolved(spec, home)).files
    with _bar() as bar:
        task = bar.add_task("reading checkpoints", total=None)
        for verdict in verify_checkpoints(
            _lakehouse(spec, home),
            run,
            step,
            files=files,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        ):
            damaged = damaged or verdict.problem is not None
            _out.print(f"step {verdict.checkpoint.step}: {verdict.problem or 'whole'}", markup=False, soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


@app.command()
def audit(
    run: RunName,
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option(help="Print SQL that answers without DLAC, in a plain DuckDB.")] = False,
) -> None:
    """Prove from the tables what the run has consumed; exit status 0 only if it is exact."""
    from dlac_pipeline.audit.audit import audit_run
    from dlac_pipeline.audit.explain import explain_sql
    from dlac_pipeline.audit.table import audit_table

    lakehouse = _lakehouse(spec, home)
    if explain:
        sys.stdout.write(explain_sql(lakehouse, run))
        return
    report = audit_run(lakehouse, run)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), default=str) + "\n")
    else:
        _out.print(audit_table(report))
    if not report.exact:
        raise typer.Exit(1)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help='SQL in DuckDB\'s dialect, e.g. "FROM checkpoints".')],
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """Ask the lakehouse: the tables, the views of the audit, and its macros consumed(file, row, checkpoint), touched(...)."""
    import duckdb

    from dlac_pipeline.audit.lakehouse_sql import open_audit

    with open_audit(_lakehouse(spec, home)) as connection:
        try:
            if not connection.extract_statements(query):
                raise SpecInvalid(f'expected a query such as "FROM checkpoints", found {query!r}')
            result = connection.execute(query)
            names = [column[0] for column in result.description or []]
            rows = result.fetchall()
        except duckdb.Error as err:
            raise SpecInvalid(f"expected a query that DuckDB can answer, found {query!r}: {err}") from err
    if as_json:
        sys.stdout.write(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=_json_value) + "\n")
        return
    table = Table()
    for name in names:
        table.add_column(Text(name))
    for row in rows:
        table.add_row(*(Text("NULL", style="dim") if value is None else Text(str(value)) for value in row))
    _out.print(table)


@app.command()
def pins(
    name: Annotated[str | None, typer.Argument(help="A run or a table; unset: every pin.")] = None,
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """The tags that keep planned snapshots alive: their age, who needs them, and what only they hold back from expiry."""
    from catalog.pins import pins_table

    found = pins_table(_lakehouse(spec, home), name)
    if as_json:
        sys.stdout.write(json.dumps([asdict(pin) for pin in found], default=str) + "\n")
        return
    table = Table("table")
    table.add_column("snapshot", no_wrap=True, min_width=19)
    for name_of_column in ("made", "pinned", "needed by", "other runs", "files held", "bytes held"):
        table.add_column(name_of_column)
    for pin in found:
        others = ", ".join(use.run for use in pin.uses if not use.needed)
        pinned = "" if pin.pinned_at is None else _ago(pin.pinned_at)
        facts = (pin.snapshot_id, _ago(pin.committed_at), pinned, ", ".join(pin.needed_by), others, pin.held_files)
        table.add_row(*(Text(str(fact)) for fact in (pin.table, *facts)), Text(decimal(pin.held_bytes)))
    _out.print(table)


@app.command()
def unpin(
    table: Annotated[str, typer.Argument(help="The source table, as namespace.table.")],
    snapshot_id: Annotated[int, typer.Argument(help="The pinned snapshot, as `dlac pins` shows it.")],
    home: Home = None,
    spec: SpecOption = None,
    force: Annotated[
        bool, typer.Option(help="Even if an unfinished run needs it; that run cannot resume then.")
    ] = False,
) -> None:
    """Let go of a pinned snapshot: expiry may then remove what only this pin held back."""
    from catalog.pins import unpin as let_go

    removed = let_go(_lakehouse(spec, home), table, snapshot_id, force=force)
    _out.print(
        f"snapshot {snapshot_id} of {table} {'is not pinned any more' if removed else 'was not pinned'}", markup=False
    )


@app.command()
def upkeep(
    home: Home = None,
    spec: SpecOption = None,
    keep: Annotated[int, typer.Option(min=1, help="Snapshots to keep of each of DLAC's own tables.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Put DLAC's own tables in order: merge small files, expire snapshots, remove unneeded files; safe while runs train."""
    from catalog.upkeep import upkeep as put_in_order

    done = put_in_order(_lakehouse(spec, home), keep=keep)
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in done]) + "\n")
        return
    table = Table("table", "files merged", "into", "snapshots expired", "files removed", "bytes removed")
    table.columns[0].no_wrap = True
    for each in done:
        name = f"{each.table} (busy)" if each.busy else each.table
        facts = (name, each.merged_files, each.into_files, each.expired_snapshots, each.removed_files)
        table.add_row(*(Text(str(fact)) for fact in facts), Text(decimal(each.removed_bytes)))
    _out.print(table)
    if any(each.busy for each in done):
        _out.print("busy: others committed so often that something was left for the next time", soft_wrap=True)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Run the main job on real input, in a checkout: plan, train, crash, recover, audit, report."""
    if importlib.util.find_spec("dagster") is None:
        raise BadInput('expected Dagster, which the demo runs on, found none: pip install "dlac[dagster]"')
    os.execv(sys.executable, [sys.executable, "-m", "jobs.demo", *context.args])


def main() -> None:
    """Entry point: every DLAC error is one line on standard error, and its class's exit status."""
    try:
        app()
    except DlacError as err:
        _err.print(Text.assemble(("error:", "red"), f" {type(err).__name__}: {err}"), soft_wrap=True)
        sys.exit(err.exit_code)


def _supervise(job: JobSpec, *, takeover: bool, plan_ids: tuple[str, ...], repin: bool, wait_s: float) -> None:
    from dlac_pipeline.recover.leg_choice import Wish
    from dlac_pipeline.recover.supervise import Supervisor

    with TrainingDisplay(_out, job.run) as display:
        wish = Wish(plan_ids=plan_ids, repin=repin)
        supervisor = Supervisor(job, on_event=display.show, wish=wish, takeover=takeover, wait_s=wait_s)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop())
        outcome = supervisor.run()
    _out.print(
        f"run {job.run!r} {outcome.ending} at step {outcome.step} after {outcome.attempts} attempt(s)", markup=False
    )


def _resolved(spec: Path, home: Path | None) -> JobSpec:
    return read_spec(spec).resolved(home or home_folder())


def _lakehouse(spec: Path | None, home: Path | None) -> Lakehouse:
    """The lakehouse to look at; the embedded one must exist, for looking creates nothing."""
    home = home or home_folder()
    embedded = LakehouseConfig().at_home(home)
    config = embedded if spec is None else _resolved(spec, home).lakehouse
    if config.uri == embedded.uri and not (home / "catalog.db").is_file():
        raise SpecInvalid(
            f"expected a lakehouse in the home folder {str(home.resolve())!r}, found no catalog.db there: "
            "name its home with --home or DLAC_HOME"
        )
    return connect(config)


def _last_spec(lakehouse: Lakehouse, run: str) -> JobSpec:
    """The spec with which a run was launched last, from its launch folder."""
    from dlac_pipeline.recover.coordinator import launch_folder_of

    rows = Ledger(lakehouse).head_rows(run)
    folder = launch_folder_of(rows, rows[-1]["attempt"])
    path = Path(folder) / "spec.json"
    if not folder or not path.is_file():
        raise NoSuchRun(f"expected the job spec of run {run!r} at {str(path)!r}, found none: name it with --spec")
    return parse_spec(json.loads(path.read_text()), origin=repr(str(path))).resolved(home_folder())


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=_err, transient=True)


def _show_facts(facts: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(facts, default=str) + "\n")
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), Text(str(value)))
    _out.print(table)


def _ago(moment: datetime) -> str:
    """How long ago, in days, hours and minutes."""
    seconds = int((datetime.now(UTC) - moment).total_seconds())
    days, hours, minutes = seconds // 86_400, seconds % 86_400 // 3600, seconds % 3600 // 60
    return f"{days} d {hours} h ago" if days else f"{hours} h {minutes} min ago"


def _json_value(value: object) -> object:
    """What JSON has no type for: decimals as numbers, all else as text."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


if __name__ == "__main__":
    main()
