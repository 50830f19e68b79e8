"""Strikes on real processes and files. A temporary fault ends with its context."""

import fcntl
import os
import random
import re
import shlex
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dlac_pipeline.lakehouse.errors import SpecInvalid, TrainingFailed

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
    """Return the living ranks of a supervisor by number. They are its children, or children of its fork server.

    A process that a rank forks, such as a worker of a DataLoader, has the rank's title, and comes after it.
    """
    title = re.compile(rf"dlac {re.escape(run)}(?: group (\d+))? rank (\d+)/(\d+)")
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        for process in supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                named = title.match(" ".join(process.cmdline()))
                if named is not None and still_runs(process):
                    group, rank, ranks_of_group = map(int, named.groups(default="0"))
                    found.setdefault(group * ranks_of_group + rank, process)
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
    """Stop the processes within the context. They continue also if this process is killed: its end closes a pipe."""
    command = ["/bin/sh", "-c", 'read _; kill -CONT "$@"', "sh", *(str(process.pid) for process in processes)]
    waits = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    send_signal(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(filter(still_runs, processes), signal.SIGCONT)
        waits.communicate()


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
    with ExitStack() as stack:
        try:
            connection = sqlite3.connect(catalog, timeout=_LOCKED_WITHIN_S, isolation_level=None)
            stack.callback(connection.close)
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as err:
            raise TrainingFailed(
                f"expected to lock {str(catalog)!r} within {_LOCKED_WITHIN_S} s, found {err}: end the program that keeps "
                "it locked"
            ) from err
        yield


@contextmanager
def move_catalog(catalog: Path) -> Iterator[None]:
    """Move an SQLite catalog aside within the context.

    A folder takes its place: a process that opened a new file there would make an empty catalog.
    """
    aside = aside_of(catalog)
    with _own_outage(catalog):
        _check_nothing_aside(catalog)
        try:
            with lock_catalog(catalog):  # between two transactions
                catalog.rename(aside)
                catalog.mkdir()
            yield
        finally:  # also if the first part failed
            if aside.exists():
                _put_catalog_back(catalog)


def restore_catalog(catalog: Path) -> bool:
    """Move an SQLite catalog back that a killed process has left aside. Return whether there was one.

    Raises:
        SpecInvalid: there is another file in its place.
        TrainingFailed: the process that moved it aside is alive.
    """
    if not aside_of(catalog).exists():
        return False
    with _own_outage(catalog):
        if catalog.is_file():
            _check_nothing_aside(catalog)
        _put_catalog_back(catalog)
    return True


def _put_catalog_back(catalog: Path) -> None:
    with suppress(OSError):  # there is none, or a program has made a file since
        catalog.rmdir()
    aside_of(catalog).rename(catalog)


@contextmanager
def _own_outage(catalog: Path) -> Iterator[None]:
    """Keep other processes from outages of the same catalog. The kernel ends that with this process."""
    descriptor = os.open(catalog.parent, os.O_RDONLY)  # to close the file itself would end SQLite's locks on it
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise TrainingFailed(
                f"expected no other outage of the catalog {str(catalog)!r}, found one of another dlac chaos: wait for its end"
            ) from err
        yield
    finally:
        os.close(descriptor)


@contextmanager
def move_folder(folder: Path) -> Iterator[None]:
    """Move a folder aside within the context. A link that leads nowhere takes its place, because a launch would make a folder."""
    aside = aside_of(folder)
    _check_nothing_aside(folder)
    try:
        folder.rename(aside)
        folder.symlink_to(aside / "unavailable" / "unavailable")
        yield
    finally:  # also if the first part failed
        if aside.exists():
            if folder.is_symlink():
                folder.unlink()
            elif folder.exists():  # a launch has made it before the link
                folder.rename(folder.with_name(f"{folder.name}.meanwhile"))
            aside.rename(folder)


def _check_nothing_aside(place: Path) -> None:
    aside = aside_of(place)
    if aside.exists():
        raise SpecInvalid(
            f"expected nothing at {str(aside)!r}, found what an earlier outage has left, and {str(place)!r} in its place: keep "
            "the newer one under that name, and move the other one away"
        )


def way_back(place: Path) -> str:
    """Return the command that undoes the present move."""
    remove = "rm" if place.is_symlink() else "rmdir"
    return f"{remove} {shlex.quote(str(place))} && mv {shlex.quote(str(aside_of(place)))} {shlex.quote(str(place))}"


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
