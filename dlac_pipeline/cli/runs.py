"""Runs: the state of one, and the list of all."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dlac_pipeline.audit.wording import format_age, lay_out_facts, table_columns
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.cli.display import command_with, describe_status, watch_run
from dlac_pipeline.spec.spec_problems import LONGEST_WAIT_S

app = typer.Typer()


@ui.command(app, ui.LOOK, "dlac status my-run", "dlac status my-run --watch", "dlac status my-run --json")
def status(
    run: ui.RunName,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Show it each second until the run is finished or Ctrl-C. Outside a terminal: as JSON lines.",
        ),
    ] = False,
    every_s: Annotated[
        float,
        typer.Option(
            help="Seconds between two updates of --watch.", min=0.1, max=LONGEST_WAIT_S, callback=ui.check_number
        ),
    ] = 1.0,
) -> None:
    """Show the state of a run: step, loss, last checkpoint, attempt, exclusions of rewinds.

    With --watch also its present work.
    """
    options = ui.place_options(spec, home)
    if watch:
        watch_run(lambda: ui.lakehouse_of(spec, home), run, ui.OUT, every_s=every_s, as_json=as_json, options=options)
        return
    from dlac_pipeline.operations.status import run_status

    facts = run_status(ui.lakehouse_of(spec, home), run)
    if as_json:
        ui.show_facts({**facts, "next_command": command_with(facts["next_command"], options)}, as_json=True)
        return
    ui.show_lines(lay_out_facts(describe_status(facts, options), ui.OUT.width))


@ui.command(app, ui.LOOK, "dlac runs", "dlac runs --json")
def runs(home: ui.Home = None, spec: ui.SpecOption = None, as_json: ui.AsJson = False) -> None:
    """List the runs of a lakehouse, by their last commit: state, step, last checkpoint, attempts."""
    from dlac_pipeline.operations.status import list_runs

    found = list_runs(ui.lakehouse_of(spec, home))
    if as_json:
        ui.show_json(found)
        return
    names = ("run", "state", "step", "checkpoint", "attempts")
    columns = table_columns(names, right=("step", "attempts"), long=("run",))
    ui.show_table(columns, [_row_of_run(each) for each in found], empty="no run yet: `dlac train SPEC` starts one")


def _row_of_run(facts: Mapping[str, Any]) -> tuple[str, ...]:
    total = facts["total_steps"]
    step = f"{facts['step']:,}" + (f"/{total:,}" if total else "")
    committed = format_age(facts["head_committed_at"]) or "none yet"
    return facts["run"], facts["launch"], step, committed, f"{facts['attempts']:,}"
