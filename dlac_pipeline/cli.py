"""The `dlac` command: plan, train, recover, look, audit. Errors come as one line and the exit status of their class."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer
from rich.text import Text

from catalog.errors import BadInput, DlacError
from dlac_pipeline.commands import branches, checkpoints, lakehouse, recovery, runs
from dlac_pipeline.commands.shared import ERR, OUT

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
    try:
        app()
    except DlacError as err:
        ERR.print(Text.assemble(("error:", "red"), f" {type(err).__name__}: {err}"), soft_wrap=True)
        sys.exit(err.exit_code)


if __name__ == "__main__":
    main()
