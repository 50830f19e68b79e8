"""Commands before adoption: does a loader resume exactly, and what did another loop consume."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.audit.wording import format_count
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import SpecInvalid

if TYPE_CHECKING:
    from dlac_pipeline.extensions.loader_check.check import Verdict
    from dlac_pipeline.extensions.loader_check.shadow.compare import Difference, ShadowReport

PANEL = "Look"
_ROW_GROUPS, _ROW_IDS = 3, 5
"""Row groups, and ids of rows, that are shown of more."""


@ui.extension_command(
    "dlac check-loader --example > my_loader.py",
    "dlac check-loader my_loader.py",
    "dlac check-loader my_loader.py --only kill,resize_2_4 --workers 0",
)
def check_loader(
    file: Annotated[Path | None, Argument(help="Python file that defines open_loader(job, state).")] = None,
    example: Annotated[bool, Option("--example", help="Print a file that works, to begin with.")] = False,
    only: Annotated[str, Option(help="Names of scenarios, separated by commas. Unset: all.")] = "",
    workers: Annotated[int, Option(min=0, max=1024, help="Workers for each rank, as job.workers.")] = 2,
    python: Annotated[
        str | None, Option(help="Interpreter with the loader's packages, and numpy. Unset: that of this command.")
    ] = None,
    limit_s: Annotated[
        float, Option(min=1, max=86_400, help="Seconds for one launch.", callback=ui.check_number)
    ] = 30.0,
    as_json: ui.AsJson = False,
) -> None:
    """Kill, resize and resume any loader, and count the rows that it repeats and misses. Exit status 0 only if there are none.

    It reads generated tables, and leaves nothing on the disk. No lakehouse is needed.
    """
    from dlac_pipeline.extensions.loader_check import check

    if example:
        sys.stdout.write(Path(check.__file__).with_name("example.py.template").read_text())
        return
    if file is None:
        raise SpecInvalid(
            "expected a file with a loader, found none: `dlac check-loader --example > my_loader.py` writes one"
        )
    # Files and processes are removed on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    scenarios = check.find_scenarios([each.strip() for each in only.split(",") if each.strip()])
    with ui.steps_bar() as bar:
        task = bar.add_task("scenarios", total=len(scenarios))
        verdicts = check.judge_loader(
            file,
            scenarios,
            python=python or sys.executable,
            workers=workers,
            limit_s=limit_s,
            progress=lambda done: bar.update(task, completed=done),
        )
    if as_json:
        ui.show_json([asdict(each) for each in verdicts])
    else:
        _show_verdicts(verdicts)
    if any(each.exact is False for each in verdicts):
        raise typer.Exit(1)


def _show_verdicts(verdicts: "Sequence[Verdict]") -> None:
    results = {True: "exact", False: "NOT EXACT", None: "skipped"}
    names, counts = ("scenario", "repeated", "missing", "result", "remark"), ("repeated", "missing")
    cells = [(each.scenario, each.repeated, each.missing, results[each.exact], each.remark) for each in verdicts]
    rows = [["" if cell is None else str(cell) for cell in row] for row in cells]
    ui.show_table(names, rows, right=counts, empty="no scenario was run")
    for each in verdicts:
        if each.exact is False:
            ui.show_text(f"{each.scenario}: {each.description}")


@ui.extension_command("dlac shadow job.toml shadow/ --by row_id", "dlac shadow job.toml shadow/ --by row_id --json")
def shadow(
    spec: ui.SpecFile,
    folder: Annotated[Path, Argument(help="Folder that your loop gave to Shadow.")],
    by: Annotated[str, Option(help="Integer column of the table that identifies a row.")],
    home: ui.Home = None,
    as_json: ui.AsJson = False,
) -> None:
    """Compare the rows that another training loop recorded with those of DLAC's reader in the same launches.

    Exit status 0 only if the loop repeated and missed no row, and read none from outside the snapshot. Nothing is written.
    """
    from dlac_pipeline.extensions.loader_check.shadow.compare import compare_shadow

    report = compare_shadow(ui.lakehouse_of(spec, home), ui.resolved(spec, home), folder, by=by)
    if as_json:
        ui.show_json(report.to_json())
    else:
        _show_shadow(report)
    if not report.exact:
        raise typer.Exit(1)


def _show_shadow(report: "ShadowReport") -> None:
    names = ("table", "snapshot_id", "snapshot_rows", "launches", "last_step")
    ui.show_facts({name: getattr(report, name) for name in names}, as_json=False)
    counts = {
        "read": (report.rows_trained, report.dlac_rows),
        "repeated": (report.repeated, report.dlac_repeated),
        "missing": (report.missing, report.dlac_missing),
        "outside the snapshot": (report.outside, report.dlac_outside),
    }
    rows = [(name, *("-" if count is None else f"{count:,}" for count in pair)) for name, pair in counts.items()]
    ui.show_table(("rows", "your loop", "DLAC"), rows, right=("your loop", "DLAC"), empty="")
    for each in report.differences:
        ui.show_text(_describe(each))
    for restart in report.restarts:
        with_dlac = "" if restart.with_dlac is None else f"; DLAC reads {_some(restart.with_dlac)}"
        ui.show_text(
            f"launch {restart.launch} ({format_count(restart.ranks, 'rank')}) began with step {restart.step}: your loop read "
            f"{_some(restart.trained)}, of which it had trained {len(restart.trained_before):,}{with_dlac}"
        )
    for note in report.notes:
        ui.show_text(f"note: {note}")


def _describe(difference: "Difference") -> str:
    place = ", ".join(f"{rows:,} in {name}" for name, rows in list(difference.row_groups.items())[:_ROW_GROUPS])
    more = len(difference.row_groups) - _ROW_GROUPS
    parts = [f"{difference.kind} in pass {difference.pass_number}: {format_count(difference.rows, 'row')}"]
    if difference.steps:
        numbers = ", ".join(map(str, difference.launches))
        parts.append(f"read in steps {difference.steps[0]} to {difference.steps[1]} of launch {numbers}")
    parts += [difference.note] if difference.note else []
    parts += [f"{place}{f', and in {more:,} more row groups' if more > 0 else ''}"] if place else []
    return "; ".join([*parts, f"such as {_some(difference.examples)}"])


def _some(ids: Sequence[int]) -> str:
    return f"{', '.join(map(str, ids[:_ROW_IDS]))}{', ...' if len(ids) > _ROW_IDS else ''}" or "none"
