"""The output of a run's ranks: `dlac logs`."""

import math
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from dlac_pipeline.cli.display import Interrupted
from dlac_pipeline.cli.shared import ERR, Home, RunName, SpecOption, extension_command, ledger_of
from dlac_pipeline.extensions.look.log_reader import LogReader
from dlac_pipeline.lakehouse.errors import DlacError, LogsMissing, SpecInvalid
from dlac_pipeline.lakehouse.ledger.run_rows import claim_of

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger
    from dlac_pipeline.lakehouse.ledger.typed_rows import LedgerRow

PANEL = "Look"
_MOST = 2**31 - 1
_LOOK_EVERY_S = 0.2
_ASK_EVERY_S = 2.0
"""Of the ledger: whether the run has ended, or another attempt was claimed."""


@extension_command("dlac logs my-run", "dlac logs my-run --rank 3 --tail 100")
def logs(
    run: RunName,
    rank: Annotated[
        int | None, Option(help="Only this rank. Unset: all ranks with a log on this node.", min=0, max=_MOST)
    ] = None,
    attempt: Annotated[int | None, Option(help="Number of the attempt. Unset: the last one.", min=1, max=_MOST)] = None,
    tail: Annotated[
        int | None, Option(help="Only so many last lines of each rank. Unset: all.", min=0, max=_MOST)
    ] = None,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Print new lines, also of later attempts, until the run ends or Ctrl-C.")
    ] = False,
    home: Home = None,
    spec: SpecOption = None,
) -> None:
    """Print the output of the ranks that is on this node. With several ranks, each line begins with its rank.

    A log has at most 8 MiB. Logs of the newest 50 attempts are kept.
    """
    ledger = ledger_of(spec, home)
    rows = ledger.head_rows(run)
    shown = _attempt_of(rows, run, attempt)
    with suppress(KeyboardInterrupt, Interrupted):
        readers = {each: LogReader(path, lines=tail) for each, path in _logs_of(rows, run, shown, rank).items()}
        _print_lines(readers, last=not follow)
        if follow:
            _follow(ledger, run, rank, shown, readers, later=attempt is None)


def _logs_of(rows: "list[LedgerRow]", run: str, attempt: int, rank: int | None) -> dict[int, Path]:
    """Return the logs of an attempt that are on this node, by rank. Raise `LogsMissing` if none that is wanted can be read."""
    from dlac_pipeline.elastic.ranks.launch_folder import logs_by_rank
    from dlac_pipeline.supervise.claims import launch_folders_of

    try:
        folders = launch_folders_of(rows, attempt)
        found = {each: path for folder in folders for each, path in logs_by_rank(folder).items()}
    except OSError as err:
        raise _unreadable(err) from err
    if not found:
        raise LogsMissing(_why_missing(rows, run, attempt, folders))
    if rank is not None and rank not in found:
        raise LogsMissing(
            f"expected a log of rank {rank} of attempt {attempt} of run {run!r} on this node, found ranks "
            f"{', '.join(map(str, sorted(found)))}: name one of them with --rank, or look on the other nodes of the run"
        )
    return {each: path for each, path in sorted(found.items()) if rank in (None, each)}


def _attempt_of(rows: "list[LedgerRow]", run: str, wanted: int | None) -> int:
    """Return the attempt that is wanted, or the last one that trains. Raise `SpecInvalid` or `LogsMissing` without one."""
    from dlac_pipeline.supervise.claims import trained_attempts

    known = trained_attempts(rows)
    if not known:
        raise LogsMissing(f"expected an attempt of run {run!r} that trains, found none yet: `dlac train` launches one")
    if wanted is not None and wanted not in known:
        raise SpecInvalid(
            f"expected an attempt of run {run!r} that trains, found --attempt {wanted}: name one of the last ones, which are "
            f"{', '.join(map(str, known[-10:]))}"
        )
    return known[-1] if wanted is None else wanted


def _why_missing(rows: "list[LedgerRow]", run: str, attempt: int, folders: list[Path]) -> str:
    what = f"expected the logs of attempt {attempt} of run {run!r}"
    claim = claim_of(rows, attempt)
    folder, node = claim.launch_folder, claim.host
    if not folder:
        return f"{what}, found that another launcher, such as torchrun, started its ranks: look for their output there"
    if folders:
        return f"{what} in {folder!r}, found none yet: the ranks have not started"
    if node and node != socket.gethostname() and not Path(folder).parent.is_dir():
        return f"{what} on this node, found that node {node!r} launched it: run `dlac logs {run}` there"
    return (
        f"{what} in {folder!r}, found no such folder: those of old attempts are removed, and a local folder is not shared by "
        f"nodes: name a newer attempt with --attempt, or run `dlac logs {run}` on node {node!r}"
    )


def _print_lines(readers: dict[int, LogReader], *, last: bool) -> bool:
    """Print the lines that can be read now, the `last` time also one without an end. Return True if any was printed."""
    printed = False
    for rank, reader in readers.items():
        begin = f"[rank {rank}] " if len(readers) > 1 else ""
        for line in _lines_of(reader, last=last):
            printed = True
            sys.stdout.write(f"{begin}{line}\n")
    sys.stdout.flush()
    return printed


def _lines_of(reader: LogReader, *, last: bool) -> Iterator[str]:
    try:
        yield from chain(reader.read(), reader.rest() if last else ())
    except OSError as err:
        raise _unreadable(err) from err


def _unreadable(err: OSError) -> LogsMissing:
    return LogsMissing(f"expected to read the logs, found {err}: run `dlac logs` as the user who trains")


def _follow(
    ledger: "Ledger", run: str, rank: int | None, attempt: int, readers: dict[int, LogReader], *, later: bool
) -> None:
    """Print what ranks append to their logs, until the run ends, or the attempt where `later` ones are not wanted."""
    asked_at = -math.inf
    while True:
        if not _print_lines(readers, last=False):
            time.sleep(_LOOK_EVERY_S)
        if time.monotonic() < asked_at + _ASK_EVERY_S:
            continue
        asked_at = time.monotonic()
        with suppress(DlacError):  # the catalog is unavailable for a moment, or a newer attempt has no log here yet
            state = ledger.state(run)
            current = state.fence.attempt
            if state.finished or (current != attempt and not later):
                _print_lines(readers, last=True)
                return
            logs = _logs_of(ledger.head_rows(run), run, current, rank)
            if current != attempt:
                _print_lines(readers, last=True)
                attempt, readers = current, {}
                ERR.print(f"attempt {attempt}", style="dim", highlight=False)
            readers |= {each: LogReader(path) for each, path in logs.items() if each not in readers}
