"""Commands before adoption: does a loader resume exactly, and what did another loop consume."""

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import SpecInvalid

app = typer.Typer()


@ui.command(
    app,
    ui.LOOK,
    "dlac check-loader --example > my_loader.py",
    "dlac check-loader my_loader.py",
    "dlac check-loader my_loader.py --only kill,resize_2_4 --workers 0",
)
def check_loader(
    file: Annotated[Path | None, Argument(help="Python file that defines open_loader(job, state).")] = None,
    example: Annotated[bool, Option("--example", help="Print a file that works, to begin with.")] = False,
    only: Annotated[str, Option(help="Names of scenarios, separated by commas. Unset: all.")] = "",
    workers: Annotated[int, Option(min=0, help="Workers for each rank, as job.workers.")] = 2,
    python: Annotated[
        Path | None, Option(help="Interpreter with the loader's packages, and numpy. Unset: that of this command.")
    ] = None,
    limit_s: Annotated[float, Option(min=1, help="Time for one launch.", callback=ui.check_number)] = 30.0,
    as_json: ui.AsJson = False,
) -> None:
    """Kill, resize and resume any loader, and count the rows that it repeats and misses. Exit status 0 only if none.

    It reads generated tables, and leaves nothing on the disk. No lakehouse is needed.
    """
    from dlac_pipeline.operations.loader_check import check

    if example:
        sys.stdout.write(Path(check.__file__).with_name("example.py.template").read_text())
        return
    if file is None:
        raise SpecInvalid(
            "expected a file with a loader, found none: `dlac check-loader --example > my_loader.py` writes one"
        )
    # Files and processes are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    scenarios = check.find_scenarios([each.strip() for each in only.split(",") if each.strip()])
    with ui.steps_bar() as bar:
        task = bar.add_task("scenarios", total=len(scenarios))
        verdicts = check.check_loader(
            file,
            scenarios,
            python=python or Path(sys.executable),
            workers=workers,
            limit_s=limit_s,
            progress=lambda done: bar.update(task, completed=done),
        )
    inexact = [each for each in verdicts if each.exact is False]
    if as_json:
        ui.show_json([asdict(each) for each in verdicts])
    else:
        results = {True: "exact", False: "NOT EXACT", None: "skipped"}
        names, counts = ("scenario", "repeated", "missing", "result", "remark"), ("repeated", "missing")
        cells = [(each.scenario, each.repeated, each.missing, results[each.exact], each.remark) for each in verdicts]
        rows = [["" if cell is None else str(cell) for cell in row] for row in cells]
        ui.show_table(names, rows, right=counts, empty="no scenario was run")
        ui.show_text("\n".join(f"{each.scenario}: {each.description}" for each in inexact))
    if inexact:
        raise typer.Exit(1)
