"""The `dlac` command: plan, train, recover, look, audit. Errors come as one line and the exit status of their class."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from catalog.errors import BadInput, DlacError
from dlac_pipeline.commands import branches, checkpoints, lakehouse, recovery, runs
from dlac_pipeline.commands.shared import ERR, OUT

_EX_IOERR = 74
app = typer.Typer(
    name="dlac",
    help="Train from Iceberg tables, with data consumption committed in the lakehouse together with every checkpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _part in (runs, recovery, checkpoints, branches, lakehouse):
    app.add_typer(_part.app)


def _print_version(asked: bool) -> None:
    if asked:
        OUT.print(f"dlac {version_of('dlac')}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What all commands share; the help is the app's."""


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Run the main job on real input, in a checkout: plan, train, crash, recover, audit, report."""
    if importlib.util.find_spec("dagster") is None:
        raise BadInput('expected Dagster, which the demo runs on, found none: pip install "dlac[dagster]"')
    os.execv(sys.executable, [sys.executable, "-m", "jobs.demo", *context.args])


def main() -> None:
    """Entry point: every DLAC error is one line on standard error, and its class's exit status."""
    if sys.stdout is None:  # closed by who started this: nobody wants to read
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as this process is there
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except DlacError as err:
        _end(f"{type(err).__name__}: {err}", err.exit_code)
    except OSError as err:
        if not _output_fails():
            raise
        _end(f"expected to write to standard output, found {err}", _EX_IOERR)


def _end(said: str, exit_code: int) -> NoReturn:
    ERR.print(Text.assemble(("error:", "red"), f" {said}"), soft_wrap=True)
    sys.exit(exit_code)


def _output_fails() -> bool:
    """Whether nothing can be written; what is left to be is dropped then, or Python would try again as it ends."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


if __name__ == "__main__":
    main()
