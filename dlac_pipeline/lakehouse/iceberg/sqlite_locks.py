"""Locks of an SQLite catalog: how long to wait for them, which process has one, and connections that report a long wait."""

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import psutil

_T = TypeVar("_T")
_LOCK_TIMEOUT_S = 30.0
REPORT_AFTER_S = 2.0
_log = logging.getLogger(__name__)


def is_locked(err: Exception) -> bool:
    """Return whether SQLite refuses since another process has the file locked."""
    return "database is locked" in str(err) or "database table is locked" in str(err)


def lock_timeout_s(uri: str) -> float:
    """Return the seconds that SQLite waits for a lock: as the catalog's address says, or half a minute."""
    values = parse_qs(uri.partition("?")[2]).get("timeout", [])
    with suppress(ValueError):
        return float(values[0]) if values else _LOCK_TIMEOUT_S
    return _LOCK_TIMEOUT_S


def locked_by(file: Path) -> str:
    """Return a clause that names the processes of this node that have an SQLite file locked, empty if none is known."""
    holders = sorted(_holders(file))
    return "".join(f"process {pid} ({_name_of(pid)}) holds a lock; " for pid in holders[:3])


class ReportingConnection(sqlite3.Connection):
    """A connection to an SQLite catalog that reports after seconds that it waits for a lock.

    SQLite itself waits without a word. So it is given the first seconds of the time-out, then the report is made, and the
    statement, which had no effect, is repeated with the rest.
    """

    def __init__(self, database: str, *, file: Path, timeout: float = _LOCK_TIMEOUT_S, **options: Any) -> None:
        """`timeout` is the whole wait. `options` are options of `sqlite3.connect`."""
        self._file = file
        self._timeout_s = timeout
        self._first_s = min(timeout, REPORT_AFTER_S)
        super().__init__(database, timeout=self._first_s, **options)

    def cursor(self, *arguments: Any) -> Any:
        """Return a cursor whose statements report."""
        return super().cursor(*(arguments or (_ReportingCursor,)))

    def execute(self, *arguments: Any) -> Any:
        """Execute a statement with a new cursor."""
        return self.cursor().execute(*arguments)

    def commit(self) -> None:
        """Commit, and report a wait for the processes that read."""
        self.wait(super().commit)

    def wait(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Call `work`. Report a wait in vain, and call it again for the rest of the time. Raises `sqlite3.OperationalError`."""
        began, was_open = time.monotonic(), self.in_transaction
        try:
            return work(*arguments)
        except sqlite3.OperationalError as err:
            waited_s = time.monotonic() - began
            in_vain = is_locked(err) and waited_s > 0.9 * self._first_s  # at once: two transactions wait for each other
            left_s = self._timeout_s - waited_s
            if not in_vain or left_s <= 0 or was_open > self.in_transaction:
                raise
        _log.warning(
            "expected the catalog %s to answer at once, found it locked for %.0f s; %swaiting for at most %.0f s",
            self._file,
            waited_s,
            locked_by(self._file),
            left_s,
        )
        try:
            self._set_timeout(left_s)
            return work(*arguments)
        finally:
            self._set_timeout(self._first_s)

    def _set_timeout(self, timeout_s: float) -> None:
        sqlite3.Cursor(self).execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}").fetchall()


class _ReportingCursor(sqlite3.Cursor):
    connection: ReportingConnection

    def execute(self, *arguments: Any) -> "_ReportingCursor":
        self.connection.wait(super().execute, *arguments)
        return self

    def executemany(self, *arguments: Any) -> "_ReportingCursor":
        self.connection.wait(super().executemany, *arguments)
        return self


def _holders(file: Path) -> set[int]:
    """Return the processes that have a lock on a file or on its journals. Linux lists them."""
    inodes = set()
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(OSError):
            inodes.add(Path(f"{file}{suffix}").stat().st_ino)
    found = set()
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] != "->" and int(fields[5].rsplit(":", 1)[-1]) in inodes:
                found.add(int(fields[4]))
    return {pid for pid in found if pid > 0 and pid != os.getpid()}


def _name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "unknown"
