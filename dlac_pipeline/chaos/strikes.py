"""Strikes on real processes and files. A temporary fault ends with its context."""

import random
import re
import signal
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dlac_pipeline.lakehouse.errors import TrainingFailed

_LOCKED_WITHIN_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    """A done fault and its times."""

    what: str
    at: float
    """Its start, in seconds since the epoch."""
    lifted_at: float
    """The end of a temporary fault, otherwise its start."""
    processes: tuple[psutil.Process, ...] = ()
    """Processes that must have ended at the end."""


def struck_now(what: str, at: float, *processes: psutil.Process) -> Struck:
    """Return a fault that is no temporary one."""
    return Struck(what=what, at=at, lifted_at=at, processes=processes)


def still_runs(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_below(supervisor: psutil.Process, run: str) -> dict[int, psutil.Process]:
    """Return the living ranks of a supervisor by number. They are its children, or those of its fork server."""
    title = re.compile(rf"dlac {re.escape(run)}(?: group (\d+))? rank (\d+)/(\d+)")
    found = {}
    with suppress(psutil.NoSuchProcess):
        for process in supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                named = title.match(" ".join(process.cmdline()))
                if named is not None and still_runs(process):
                    group, rank, ranks_of_group = map(int, named.groups(default="0"))
                    found[group * ranks_of_group + rank] = process
    return dict(sorted(found.items()))


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> float:
    """Signal the processes, and return the time."""
    at = time.time()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return at


@contextmanager
def suspend(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop the processes within the context."""
    send_signal(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(filter(still_runs, processes), signal.SIGCONT)


def damage_file(folder: Path, chance: random.Random, *, flip: bool = True) -> str:
    """Flip a bit of a file in a checkpoint's folder, or delete the file. Return a description."""
    file = chance.choice(sorted(each for each in folder.rglob("*") if each.is_file() and each.stat().st_size))
    if not flip:
        file.unlink()
        return f"deleted: {file.name}"
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return f"a bit flipped in {file.name}"


@contextmanager
def lock_catalog(catalog: Path) -> Iterator[None]:
    """Lock an SQLite catalog against all readers and writers within the context."""
    connection = sqlite3.connect(catalog, timeout=_LOCKED_WITHIN_S, isolation_level=None)
    try:
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as err:
            raise TrainingFailed(
                f"expected to lock {str(catalog)!r} within {_LOCKED_WITHIN_S} s, found {err}: end the program that keeps "
                "it locked"
            ) from err
        yield
    finally:
        connection.close()


@contextmanager
def move_catalog(catalog: Path) -> Iterator[None]:
    """Move an SQLite catalog aside within the context.

    A folder takes its place: a process that opened a new file there would make an empty catalog.
    """
    aside = aside_of(catalog)
    try:
        with lock_catalog(catalog):  # between two transactions
            catalog.rename(aside)
            catalog.mkdir()
        yield
    finally:  # also if a signal ended the first part
        if aside.exists():
            with suppress(FileNotFoundError):
                catalog.rmdir()
            aside.rename(catalog)


@contextmanager
def move_folder(folder: Path) -> Iterator[None]:
    """Move a folder aside within the context. A link that leads nowhere takes its place, because a launch would make a folder."""
    aside = aside_of(folder)
    try:
        folder.rename(aside)
        folder.symlink_to(aside / "unavailable" / "unavailable")
        yield
    finally:  # also if a signal ended the first part
        if aside.exists():
            folder.unlink(missing_ok=True)
            aside.rename(folder)


def aside_of(path: Path) -> Path:
    """Return the place of a file or folder while it is moved aside."""
    return path.with_name(f"{path.name}.aside")


def kill_tree(process: psutil.Process) -> list[psutil.Process]:
    """SIGKILL a process with all its descendants, and return them."""
    tree = [process]
    with suppress(psutil.NoSuchProcess):
        tree += process.children(recursive=True)
    send_signal(tree, signal.SIGKILL)
    return tree
