"""What went wrong, what became of it, and whether a run could be resumed: incidents, rehearsals."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from dlac_pipeline.commands.shared import OUT, AsJson, Home, RunName, SpecOption, given_spec, lakehouse_of

if TYPE_CHECKING:
    from catalog.recoveries import Recovery

app = typer.Typer()


@app.command()
def rehearse(
    run: RunName,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to do again; unset: all up to the next checkpoint, at most 20.")
    ] = None,
    sandbox: Annotated[
        Path | None,
        typer.Option(help="Folder for the sandbox, which holds a copy of the checkpoint; unset: temporary."),
    ] = None,
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """Restore a checkpoint in a sandbox, do the steps behind it again, and compare the losses; exit status 0 only if identical.

    Production is only read. The script finds DLAC_REHEARSAL=1 in its environment.
    """
    from dlac_pipeline.recover.rehearse import rehearse as do_again

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the sandbox is removed on the way out
    job = given_spec(run, spec, home)
    done = do_again(lakehouse_of(spec, home), run, spec=job, steps=steps, sandbox_folder=sandbox)
    if as_json:
        sys.stdout.write(json.dumps(done.to_json()) + "\n")
    else:
        table = Table("step", "recorded", "replayed", "")
        for each in done.steps:
            said = "no loss recorded" if not each.compared else "identical" if each.identical else "differs"
            skipped = ", skipped" if each.recorded_skipped or each.replayed_skipped else ""
            table.add_row(str(each.step), repr(each.recorded), repr(each.replayed), said + skipped)
        OUT.print(table)
        OUT.print(done.summary(), markup=False, soft_wrap=True)
    if not done.identical:
        raise typer.Exit(1)


@app.command()
def incidents(
    run: Annotated[str | None, typer.Argument(help="Name of the training run; unset: every run.")] = None,
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """Every recovery: what failed, how it was noticed, the seconds of each phase, rows replayed, work lost, what became of it."""
    from catalog.ledger import Ledger
    from catalog.recoveries import recoveries_of

    lakehouse = lakehouse_of(spec, home)
    if run is not None:
        Ledger(lakehouse).head_rows(run)  # says so if there is no such run
    found = recoveries_of(lakehouse, run)
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in found], default=str) + "\n")
        return
    table = Table("failed", "cause", show_lines=True)
    table.add_column("phases, in seconds", no_wrap=True)
    table.add_column("lost")
    table.add_column("outcome")
    for each in found:
        failed = f"{each.run}\nattempt {each.replaced_attempt}\n{each.failed_at:%Y-%m-%d\n%H:%M:%S}"
        cause = f"{each.cause}\nnoticed by {each.noticed_by}"
        work = "" if each.work_lost_s is None else f"\n{each.work_lost_s:.1f} s of training"
        lost = f"{each.rows_replayed:,} rows replayed{work}"
        outcome = each.outcome if each.outcome == "gave up" else f"{each.outcome} at step {each.resumed_step}"
        table.add_row(*(Text(fact) for fact in (failed, cause, _phases(each), lost, outcome)))
    OUT.print(table)


def _phases(recovery: Recovery) -> str:
    """Those that took time, in order; older rows do not say all of them."""
    from catalog.recoveries import PHASES

    seconds = {name.replace("_", " "): getattr(recovery, f"{name}_s") for name in PHASES}
    return "\n".join(f"{name} {value:.2f}" for name, value in seconds.items() if value)
