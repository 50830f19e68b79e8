"""Shared parts of subcommands: their options, the place of the lakehouse, and the display of facts.

A help imports neither pydantic nor the ledger, so the functions import both.
"""

import math
import os
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from rich import progress
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from dlac_pipeline.audit.wording import format_bytes
from dlac_pipeline.lakehouse.errors import NoSuchJobSpec, SpecInvalid
from dlac_pipeline.lakehouse.plain_json import strict_json

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.config import LakehouseConfig
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger
    from dlac_pipeline.spec.job_spec import JobSpec

Command = TypeVar("Command", bound=Callable[..., Any])
TRAIN, RECOVER, STORAGE = "Train", "Recover", "Storage"
"""Groups of commands in the help of `dlac`."""
SPEC_PLACEHOLDER = "FILE"
"""Placeholder in a command for a job spec whose path is unknown on this node."""
WIDE = 100_000
"""Columns without a terminal: nothing is folded or cut off, for the program that reads it."""
_GAP = "  "
_TEXTS = {"key", "document", "query", "why", "where", "exclude"}
"""Parameters of commands that may be blank, or whose error says more."""
_JOINERS = "\u200c\u200d"
"""Parts of words in some scripts, and of emoji."""


def terminal_text(text: str) -> str:
    """Return the text with control characters, and those that change the order of others, as escapes such as \\x1b.

    Names, paths and values of tables come from others, and could move the cursor. Line breaks and tabs stay.
    """

    def is_shown(character: str) -> bool:
        is_control = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        return not is_control or character in ("\n", "\t", *_JOINERS)

    if text.isprintable():
        return text
    return "".join(each if is_shown(each) else each.encode("unicode_escape").decode() for each in text)


class SafeConsole(Console):
    """A console that shows control characters in its text instead of obeying them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with `terminal_text`. The console's own control codes stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=terminal_text(segment.text))


OUT = SafeConsole(width=None if getattr(sys.stdout, "isatty", bool)() else WIDE)
ERR = SafeConsole(stderr=True)


def check_run(run: str | None) -> str | None:
    """Return the name of a run, if any. Raise `SpecInvalid` if a run cannot have it."""
    from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name

    return run if run is None else check_run_name(run)


Home = Annotated[
    Path | None,
    Option(
        "--home",
        help="Folder of the embedded lakehouse and store.",
        envvar="DLAC_HOME",
        show_default=".dlac here or above",
    ),
]
SpecFile = Annotated[Path, Argument(help="Job spec, a .toml or .yaml file.")]
SpecOption = Annotated[
    Path | None,
    Option(
        "--spec",
        help="Job spec with the lakehouse, if that is not in the home folder, and with the run, if another node launched it.",
    ),
]
RunName = Annotated[str, Argument(help="Name of the training run.", callback=check_run)]
Step = Annotated[int | None, Option(help="Step of the checkpoint. Unset: the head.")]
CheckpointId = Annotated[
    str | None, Option("--checkpoint", help="Id of the checkpoint, if several branches have one of that step.")
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]


def check_number(value: float) -> float:
    """Return the number of an option. Raise `typer.BadParameter` for nan, which is within every bound."""
    if math.isnan(value):
        raise typer.BadParameter(f"expected a number, found {value!r}")
    return value


def command(app: typer.Typer, panel: str | None, *commands: str, **options: Any) -> Callable[[Command], Command]:
    """Return the decorator of a command of `app`, in a group of the help, whose end has examples. `options` are typer's.

    The command refuses blank values, which would mean another run, table or column than a script meant.
    """
    register = app.command(rich_help_panel=panel, epilog=_epilog(commands), **options)

    def decorate(function: Command) -> Command:
        return register(_checked(function))

    return decorate


def extension_command(*commands: str) -> Callable[[Command], Command]:
    """Return the decorator of a function that is a command of an extension. It has examples and checks as `command` has."""

    def decorate(function: Command) -> Command:
        checked = _checked(function)
        checked.__dict__["epilog"] = _epilog(commands)
        return checked

    return decorate


def _epilog(commands: Sequence[str]) -> str:
    return "\n\n".join(("Examples:", *(escape(f"$ {each}") for each in commands)))


def _checked(function: Command) -> Command:
    """Return a function that checks its values before it works."""
    defaults = {name: each.default for name, each in signature(function).parameters.items()}

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for name, value in given.items():
            if name not in _TEXTS and value != defaults.get(name):
                _check_not_blank(name, value)
            if isinstance(value, Path) and name != "home":
                _check_expanded(value)
        return function(*args, **given)

    return cast(Command, checked)


def _check_not_blank(name: str, value: object) -> None:
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, str | Path) and not str(each).strip():
            raise SpecInvalid(
                f"expected a value of {name.replace('_', '-')!r}, found the blank {str(each)!r}: give one, or leave it out"
            )


def _check_expanded(path: Path) -> None:
    """Raise `SpecInvalid` for a path such as ~user/x, which the shell left as it is. It would name a new folder here."""
    folder = Path(path.parts[0] if path.parts else "")
    if folder.name.startswith("~") and len(path.parts) > 1 and not folder.exists():
        raise SpecInvalid(f"expected a path, found {str(path)!r} with the home folder of an unknown user: write it out")


def resolved(spec: Path, home: Path | None) -> "JobSpec":
    """The job spec in a file, with the embedded lakehouse of `home` where it names none."""
    from dlac_pipeline.lakehouse.config import home_folder
    from dlac_pipeline.spec.job_spec import read_spec

    return read_spec(spec).resolved(home or home_folder())


def lakehouse_of(
    spec: Path | None, home: Path | None, *, create: bool = False, catalog: str | None = None
) -> "Lakehouse":
    """Return the lakehouse of a spec, else of a named catalog, else of `home`. It must exist unless `create` is set."""
    from dlac_pipeline.lakehouse.iceberg.connect import connect

    if spec is not None:
        job = resolved(spec, home)
        return connect(job.lakehouse, create=create, tables=job.own_tables)
    return connect(config_of(home, catalog), create=create)


def config_of(home: Path | None, catalog: str | None = None) -> "LakehouseConfig":
    """Return the settings of a named catalog, else of the embedded lakehouse of `home`."""
    from dlac_pipeline.lakehouse.config import LakehouseConfig, home_folder

    return LakehouseConfig(name=catalog).at_home(home or home_folder())


def ledger_of(spec: Path | None, home: Path | None) -> "Ledger":
    """The ledger of a lakehouse, which must exist."""
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger

    return Ledger(lakehouse_of(spec, home))


def given_spec(run: str, spec: Path | None, home: Path | None) -> "JobSpec | None":
    """Return the job spec in a file, for this run whichever it names, or None without a file."""
    from dlac_pipeline.spec.job_spec import parse_spec

    if spec is None:
        return None
    raw = {**resolved(spec, home).model_dump(), "run": run}
    return parse_spec(raw, origin=f"{str(spec)!r} with the name of the run")


def spec_of_run(run: str, spec: Path | None, home: Path | None, *, lakehouse: "Lakehouse | None" = None) -> "JobSpec":
    """Return the spec as given, or of the last launch. Raise `NoSuchRun`, or `NoSuchJobSpec` if that is not on this node."""
    from dlac_pipeline.supervise.claims import last_spec

    return given_spec(run, spec, home) or last_spec(lakehouse or lakehouse_of(None, home), run)


def known_spec(lakehouse: "Lakehouse", run: str, spec: Path | None, home: Path | None) -> "JobSpec | None":
    """Return the run's spec, or None for one that was launched from another node."""
    with suppress(NoSuchJobSpec):
        return spec_of_run(run, spec, home, lakehouse=lakehouse)
    return None


def bar_columns(*facts: progress.ProgressColumn) -> tuple[progress.ProgressColumn, ...]:
    """Return the columns of a progress bar of so many of so many, with further facts before the times."""
    count = progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), progress.MofNCompleteColumn()
    return *count, *facts, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()


def steps_bar() -> progress.Progress:
    """Return a progress bar on standard error that disappears at its end."""
    return progress.Progress(*bar_columns(), console=ERR, transient=True)


def show_text(text: str) -> None:
    """Print text that is no markup. The terminal breaks its lines."""
    OUT.print(text, markup=False, soft_wrap=True)


def show_json(value: object) -> None:
    """Print a value as a line of JSON."""
    sys.stdout.write(strict_json(value) + "\n")


def show_table(names: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), empty: str) -> None:
    """Show a table without lines and empty columns, or the sentence `empty` without a row.

    A table that is wider than the terminal becomes blocks. `right` names the columns of numbers. Rich takes seconds for
    thousands of rows, so they are laid out here.
    """
    if not rows:
        show_text(empty)
        return
    used = [index for index in range(len(names)) if any(row[index] for row in rows)]
    names, *shown = [[terminal_text(row[index].replace("\n", " ")) for index in used] for row in (names, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(names, *shown, strict=True)]
    if sum(widths) + len(_GAP) * (len(widths) - 1) > OUT.width:
        show_blocks([(name, cell) for name, cell in zip(names, row, strict=True) if cell] for row in shown)
        return
    for row in (names, *shown):
        padded = []
        for name, cell, width in zip(names, row, widths, strict=True):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if name in right else cell + space)
        OUT.print(Text(_GAP.join(padded).rstrip()), soft_wrap=True)


def show_blocks(blocks: Iterable[Iterable[tuple[str, str]]]) -> None:
    """Print blocks of names and values, each pair on a line. The lines are broken at the width of the terminal."""
    for block in blocks:
        pairs = list(block)
        width = max((cell_len(name) for name, _ in pairs), default=0)
        below = "\n" + " " * width + _GAP
        lines = [name + " " * (width - cell_len(name)) + _GAP + value.replace("\n", below) for name, value in pairs]
        OUT.print(Text("\n".join([*lines, ""]), overflow="fold"))


def show_facts(facts: Mapping[str, object], *, as_json: bool) -> None:
    """Show facts: a label and a value on each line for people, or one JSON object."""
    if as_json:
        show_json(facts)
    else:
        OUT.print(facts_table({name.replace("_", " "): format_fact(name, value) for name, value in facts.items()}))


def facts_table(facts: Mapping[str, object]) -> Table:
    """Return facts as a label and a value on each line. Long values are folded. Unknown and empty ones are left out."""
    block = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, len(_GAP), 0, 0))
    for name, value in facts.items():
        if value is not None and str(value):
            block.add_row(plain_text(name), plain_text(value))
    return block


def plain_text(value: object) -> Text:
    """Return a value as text that is no markup."""
    return Text(terminal_text(str(value)))


def format_fact(name: str, value: object) -> object:
    """Return a value as people read it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: None}[value]
    if name == "bytes" and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S %Z}".rstrip()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


def place_options(spec: Path | None, home: Path | None) -> tuple[str, ...]:
    """The options that a further command needs to find the same lakehouse."""
    options: tuple[str, ...] = ()
    if home is not None and str(home) != os.environ.get("DLAC_HOME", ".dlac"):
        options += ("--home", str(home))
    return options if spec is None else (*options, "--spec", str(spec))


def command_with(command: str, options: Sequence[str]) -> str:
    """Return a command, if any, with the options that name the lakehouse. A job spec among them replaces the placeholder."""
    if "--spec" in options:
        command = command.removesuffix(f" --spec {SPEC_PLACEHOLDER}")
    return " ".join([command, *map(shlex.quote, options)]) if command else ""
