"""What subcommands share: their options, where the lakehouse is, and how facts are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from catalog.errors import SpecInvalid
from catalog.lakehouse_config import LakehouseConfig
from dlac_pipeline.spec import JobSpec, home_folder, read_spec

if TYPE_CHECKING:
    from catalog.connect import Lakehouse

_WIDE = 100_000
"""Columns of what is no terminal: nothing is folded, nor cut off, for the program that reads it."""
OUT = Console(width=None if getattr(sys.stdout, "isatty", bool)() else _WIDE)
ERR = Console(stderr=True)

Home = Annotated[
    Path | None,
    typer.Option(
        "--home", help="Folder of the embedded lakehouse and store.", envvar="DLAC_HOME", show_default=".dlac"
    ),
]
SpecFile = Annotated[Path, typer.Argument(help="Job spec, a .toml or .yaml file.")]
SpecOption = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        help="Job spec: where the lakehouse is, if not in the home folder, and how the run is set, if it was launched elsewhere.",
    ),
]
RunName = Annotated[str, typer.Argument(help="Name of the training run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def resolved(spec: Path, home: Path | None) -> JobSpec:
    """The job spec in a file, with the embedded lakehouse of `home` where it names none."""
    return read_spec(spec).resolved(home or home_folder())


def lakehouse_of(spec: Path | None, home: Path | None) -> Lakehouse:
    """The lakehouse to look at; the embedded one must exist, for looking creates nothing."""
    from catalog.connect import connect

    home = home or home_folder()
    embedded = LakehouseConfig().at_home(home)
    config = embedded if spec is None else resolved(spec, home).lakehouse
    if config.uri == embedded.uri and not (home / "catalog.db").is_file():
        raise SpecInvalid(
            f"expected a lakehouse in the home folder {str(home.resolve())!r}, found no catalog.db there: "
            "name its home with --home or DLAC_HOME"
        )
    return connect(config)


def given_spec(run: str, spec: Path | None, home: Path | None) -> JobSpec | None:
    """The job spec in a file, of this run whichever it names; None: none is given."""
    return None if spec is None else resolved(spec, home).model_copy(update={"run": run})


def spec_of_run(run: str, spec: Path | None, home: Path | None, *, lakehouse: Lakehouse | None = None) -> JobSpec:
    """The run's spec: as given, or as it was launched last, for which the lakehouse is looked into, open already or not.

    Raises:
        NoSuchRun: none is given, and that of the last launch is not on this machine.
    """
    from dlac_pipeline.recover.claims import last_spec

    return given_spec(run, spec, home) or last_spec(lakehouse or lakehouse_of(None, home), run)


def steps_bar() -> Progress:
    """A progress bar of so many of so many."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=ERR, transient=True)


def show_rows(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table, or one for each row, a field per line, where that would be wider than the terminal; None is NULL."""
    cells = [[Text("NULL", style="dim") if value is None else Text(str(value)) for value in row] for row in rows]
    table = Table()
    for name in names:
        table.add_column(Text(name))
    for row in cells:
        table.add_row(*row)
    if OUT.measure(table, options=OUT.options.update(width=_WIDE)).maximum <= OUT.width:
        OUT.print(table)
        return
    for row in cells:
        one = Table(show_header=False)
        one.add_column(overflow="fold")
        one.add_column(overflow="fold")
        for name, cell in zip(names, row, strict=True):
            one.add_row(Text(name), cell)
        OUT.print(one)


def show_facts(facts: dict[str, object], *, as_json: bool) -> None:
    """A table of two columns, or a JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(facts, default=str) + "\n")
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), Text(str(value)))
    OUT.print(table)


def ago(moment: datetime) -> str:
    """How long ago, in days, hours and minutes."""
    seconds = int((datetime.now(UTC) - moment).total_seconds())
    days, hours, minutes = seconds // 86_400, seconds % 86_400 // 3600, seconds % 3600 // 60
    return f"{days} d {hours} h ago" if days else f"{hours} h {minutes} min ago"
