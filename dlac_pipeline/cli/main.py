"""The `dlac` command: plan, train, recover, look, audit. Errors come as one line and the exit status of their class."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text
from typer import Option

from dlac_pipeline.cli import training
from dlac_pipeline.cli.display import Interrupted
from dlac_pipeline.cli.extension_commands import ExtensibleGroup, InnerGroup
from dlac_pipeline.cli.shared import ERR, OUT, STORAGE, terminal_text
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.variables import check_pyiceberg
from dlac_pipeline.launchers.bug_report import report_unexpected

_EX_IOERR = 74
_REPORTS_LEFT = {"duckdb", "torch"}
"""Libraries that print, or clean up, the rest of their objects at the end of a process."""
_COLLECT_AFTER = 50_000
"""Objects that are allocated before the youngest are collected. Python's own 700 suits programs that import less."""
app = typer.Typer(
    name="dlac",
    cls=ExtensibleGroup,
    help="Train from Iceberg tables. Each checkpoint is committed together with the rows that it consumed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_GROUPS = {
    "table": "list and release the pins of source tables, and register Parquet files as one.",
    "ledger": "keep DLAC's own tables small, and rebuild the ledger after a loss.",
    "checkpoint": "list, tag, verify, retire and export checkpoints, and adopt checkpoints of other programs.",
}
"""Name of a group of commands -> its help. Extensions have its commands."""
app.add_typer(training.app)
for _name, _help in _GROUPS.items():
    _group = typer.Typer(cls=InnerGroup, no_args_is_help=True)
    app.add_typer(_group, name=_name, help=f"Group: {_help}", rich_help_panel=STORAGE)


def _print_version(requested: bool) -> None:
    if requested:
        OUT.print(f"dlac {version_of('dlac-pipeline')}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Define options of the command itself. The help text is the app's."""


def main() -> None:
    """Run the command: every error is one line on standard error. A DLAC error has its class's exit status.

    Any other exception is a bug: its traceback goes into a file. Ctrl-C and a closed pipe are no errors.
    """
    # To collect garbage took a third of the time of a command that only looks: seldom, and not at all on the way out.
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    atexit.register(_leave_garbage)
    if sys.stdout is None:  # the parent process closed it, so there is no reader
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # stays open until this process ends
    try:
        try:
            check_pyiceberg(os.environ)  # before a command imports PyIceberg
            with _interruptible():
                app()
        finally:
            sys.stdout.flush()
    except DlacError as err:
        end_with_message(f"{type(err).__name__}: {err}", err.exit_code)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    except OSError as err:
        if not _output_fails():  # it was another file or pipe
            end_with_message(report_unexpected(err), DlacError.exit_code)
        if isinstance(err, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        end_with_message(f"expected to write to standard output, found {err}", _EX_IOERR)
    except Exception as err:
        end_with_message(report_unexpected(err), DlacError.exit_code)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise `Interrupted` here, unless the parent process has set it to be ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _raise_interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise_interrupted(*_: object) -> NoReturn:
    raise Interrupted


def _leave_garbage() -> None:
    """Leave all objects to the end of the process, unless a library is loaded that reports what it finds left."""
    if sys.modules.keys().isdisjoint(_REPORTS_LEFT):
        gc.freeze()


def end_with_message(message: str, exit_code: int) -> NoReturn:
    """Print an error, and end the command with its exit status."""
    ERR.print(Text.assemble(("error:", "red"), f" {terminal_text(message)}"), soft_wrap=True)
    sys.exit(exit_code)


def _output_fails() -> bool:
    """Return True if the output cannot be written. The rest is dropped then, or Python would try again at its end."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


if __name__ == "__main__":
    main()
