"""Commands that replay committed steps in a sandbox: `dlac rehearse` and `dlac spike`."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from dlac_pipeline.audit.wording import format_count
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.extensions.replay.rows_command import show_step_rows
from dlac_pipeline.lakehouse.plain_json import strict_json
from dlac_pipeline.spec.bounds import MOST_STEPS

if TYPE_CHECKING:
    from dlac_pipeline.extensions.replay.spike import SpikeReport

PANEL = "Recover"
Sandbox = Annotated[Path | None, Option(help="Folder for the sandbox with a copy of the checkpoint. Unset: temporary.")]


@ui.extension_command("dlac rehearse my-run", "dlac rehearse my-run --steps 5 --sandbox /scratch")
def rehearse(
    run: ui.RunName,
    steps: Annotated[
        int | None,
        Option(min=1, max=MOST_STEPS, help="Steps to repeat. Unset: all up to the next checkpoint, at most 20."),
    ] = None,
    sandbox: Sandbox = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Restore a checkpoint in a sandbox, repeat the steps after it, and compare the losses. Exit status 0 only if identical.

    Production is only read. The script finds DLAC_REHEARSAL=1 in its environment.
    """
    from dlac_pipeline.extensions.replay.rehearse import rehearse_run as do_again

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the sandbox is removed on the way out
    job = ui.given_spec(run, spec, home)
    done = do_again(ui.lakehouse_of(spec, home), run, spec=job, steps=steps, sandbox_folder=sandbox)
    if as_json:
        ui.show_json(done.to_json())
    else:
        names = ("step", "recorded", "replayed", "verdict")
        rows = []
        for each in done.steps:  # two losses to the last digit, and whether they are the same
            verdict = "no loss recorded" if not each.compared else "identical" if each.identical else "differs"
            skipped = ", skipped" if each.recorded_skipped or each.replayed_skipped else ""
            losses = ("" if loss is None else repr(loss) for loss in (each.recorded, each.replayed))
            rows.append((str(each.step), *losses, verdict + skipped))
        ui.show_table(names, rows, right=("step",), empty="no step was replayed")
        ui.show_text(done.summary())
    if not done.identical:
        raise typer.Exit(1)


@ui.extension_command(
    "dlac spike my-run",
    "dlac spike my-run --step 4210 --text body --top 5",
    "dlac spike my-run --by doc_id --json",
)
def spike(
    run: ui.RunName,
    step: Annotated[int | None, Option(help="Optimizer step. Unset: the largest spike of the loss.")] = None,
    top: Annotated[int, Option(min=1, max=1_000_000, help="Number of rows to show.")] = 10,
    text: Annotated[str | None, Option(help="Column of the source whose values are shown too.")] = None,
    by: Annotated[
        list[str] | None,
        Option(help="Column that identifies rows, if the source has no identity columns. The option can be repeated."),
    ] = None,
    sandbox: Sandbox = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """Find loss spikes, rank the rows of the step by their loss in a sandbox, and print the rewind that excludes the worst.

    Production is only read. The script finds DLAC_REHEARSAL=1 in its environment.
    """
    from dlac_pipeline.extensions.replay.spike import explain_spike

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the sandbox is removed on the way out
    lakehouse, job = ui.lakehouse_of(spec, home), ui.given_spec(run, spec, home)
    report = explain_spike(lakehouse, run, step=step, column=text, by=by or (), spec=job, sandbox_folder=sandbox)
    if as_json:
        sys.stdout.write(strict_json(report.to_json(top)) + "\n")
        return
    for line in describe_spike(report):
        ui.show_text(line)
    shown = report.rows[:top]
    marks = ["*" if place < report.to_blame else "" for place in range(len(shown))]
    first = {"loss": [f"{loss:.6g}" for loss, _ in shown], "": marks}
    show_step_rows([row for _, row in shown], text, first, empty="")
    for command in report.rewinds:
        ui.show_text(ui.command_with(command, ui.place_options(spec, home)))
    if report.unnamed:
        ui.show_text(report.unnamed)


def describe_spike(report: "SpikeReport") -> list[str]:
    """Return sentences about a spike: its loss, its replay, the rows to blame, and other spikes."""
    mine, recorded, lines = report.spike, report.recorded, []
    before = f", after a median of {mine.before:.6g}" if mine else ""
    until = f", high until step {mine.last_step}" if mine and mine.last_step > report.step else ""
    lines.append(f"step {report.step}: loss {report.replayed if recorded is None else recorded:.6g}{before}{until}")
    place = f"checkpoint of step {report.replayed_from}" if report.replayed_from else "beginning"
    same = "bit-identical" if report.identical else f"found {report.replayed!r}, and in the ledger {recorded!r}"
    lines.append(f"replayed from the {place}: {'no recorded loss to compare' if recorded is None else same}")
    if report.to_blame:
        lines.append(f"without {report.to_blame} of {format_count(len(report.rows), 'row')} (*) it would be no spike")
    elif mine:
        lines.append("no few rows are to blame: look at the step before, the weights and the learning rate")
    if report.others:
        listed = ", ".join(f"{each.step} ({each.peak:.6g})" for each in report.others[:10])
        lines.append(f"{format_count(len(report.others), 'other spike')}, at steps {listed}")
    return lines
