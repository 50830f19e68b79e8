"""The processes of one node's ranks in one attempt: started in the background, signalled by process group, waited for."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from dlac_pipeline.lakehouse.errors import DlacError, TrainingFailed, error_kind

HANG = "Hang"
"""Kind of the failure of a rank that shows no progress."""
_POLL_S = 0.01
_STARTER_ENDS_S = 5.0
_UNKNOWN = 255
"""Exit status that multiprocessing gives a process whose fork server has ended."""
Reason = dict[str, Any]  # fields of `Exit`
Processes = Mapping[int, BaseProcess]  # by rank


class RankProcesses:
    """Processes that a thread starts, so that the supervisor can answer during the start."""

    def __init__(
        self,
        ranks: range,
        start: Callable[[], Processes],
        *,
        abort: Callable[[], None],
        why_unknown: Callable[[], DlacError | None],
        on_gone: Callable[[], None] = lambda: None,
        patience_s: float,
    ) -> None:
        """A thread calls `start`, unless the ranks are unwanted by then. A start that takes `patience_s` seconds hangs.

        `abort` may end a start early, and is called again after a start of ranks that are unwanted by then.
        `why_unknown` returns why the exit status of a rank is not known, if it is not. `on_gone` is called once all are gone.
        """
        self.ranks = ranks
        self._abort = abort
        self._why_unknown = why_unknown
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._patience_s = patience_s
        self._deadline = time.monotonic() + patience_s
        self._processes: Processes = {}
        self._reason: Reason = {}
        self._aborted_by: signal.Signals | None = None
        self._is_wanted = True
        """True if ranks are still to be started."""
        self._started = threading.Event()
        """Set when it is known which ranks exist."""
        self._starting = threading.Event()
        """Set when the start is over."""
        threading.Thread(target=self._start, args=(start,), name="ranks", daemon=True).start()

    @property
    def is_started(self) -> bool:
        """True if all process ids are known, or it is known that no rank will start."""
        if not self._started.is_set() and time.monotonic() > self._deadline:
            message = f"the ranks were not started within {self._patience_s:.0f} s: see the fork server's log"
            self._reason = {"kind": HANG, "message": message}
            self._give_up()
        return self._started.is_set()

    def reason(self, rank: int) -> Reason:
        """Return why a rank could not be started, or why its end is unknown. Empty: neither is so."""
        if rank in self._processes and self.exit_code(rank) == _UNKNOWN:
            reason = self._why_unknown()
            return {} if reason is None else reason_not_started(reason)
        return self._reason if self.is_started and self._aborted_by is None else {}

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of ranks, 0 for one that was not started. Waits until they are known."""
        while not self.is_started:
            time.sleep(_POLL_S)
        return [self._pid(rank) for rank in self.ranks]

    def exit_code(self, rank: int) -> int | None:
        """Return the exit status of a rank. Negative: the signal that killed it. None: it runs, or will."""
        if rank in self._processes:
            return self._processes[rank].exitcode
        if not self.is_started:
            return None
        return 1 if self._aborted_by is None else -self._aborted_by

    def start_again(self, start: Callable[[], Processes]) -> None:
        """Start processes of ranks whose own have ended, and watch them. Raises as `start`."""
        processes = start()
        with self._lock:
            self._processes = {**self._processes, **processes}

    def kill(self, rank: int) -> None:
        """Kill the process group of one rank."""
        signal_rank(self._pid(rank), signal.SIGKILL, alive=self.exit_code(rank) is None)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process group of every rank that runs. Ranks that have not started never start."""
        if not self._started.is_set():
            self._aborted_by = number
            self._give_up()
        for rank, process in self._processes.items():
            alive = process.exitcode is None
            if alive or number == signal.SIGKILL:
                signal_rank(self._pid(rank), number, alive=alive)

    def wait_until_gone(self, within_s: float) -> dict[int, int]:
        """Wait for the end of all ranks. Return the ranks that still run, as process ids by rank."""
        deadline = time.monotonic() + within_s
        self._starting.wait(_STARTER_ENDS_S)  # a start that takes longer kills its ranks itself
        running = {rank: self._pid(rank) for rank in self._processes}
        while running := {rank: pid for rank, pid in running.items() if is_running(pid)}:
            if time.monotonic() > deadline:
                break
            for pid in running.values():  # one whose fork server died may have had no group yet
                signal_rank(pid, signal.SIGKILL, alive=False)
            time.sleep(_POLL_S)
        for process in self._processes.values():
            process.join(0)  # reaps it
        self._on_gone()
        return running

    def _start(self, start: Callable[[], Processes]) -> None:
        try:
            processes = start() if self._is_wanted else {}
        except Exception as err:
            processes, self._reason = {}, self._reason or reason_not_started(err)
        if not self._is_wanted:
            self._abort()  # multiprocessing replaces a server that was ended while it was asked
        with self._lock:
            self._processes = processes
            if not self._is_wanted:
                for process in processes.values():
                    signal_rank(process.pid or 0, signal.SIGKILL, alive=process.exitcode is None)
            self._started.set()
            self._starting.set()

    def _give_up(self) -> None:
        """Make the thread start no more ranks. It kills the ranks that it has just started."""
        with self._lock:
            if self._started.is_set():
                return
            self._is_wanted = False
            self._started.set()
        self._abort()

    def _pid(self, rank: int) -> int:
        return (self._processes[rank].pid or 0) if rank in self._processes else 0


def reason_not_started(err: Exception) -> Reason:
    """Return the reason of a rank that was not started, in the form in which ranks record theirs."""
    if isinstance(err, DlacError):
        return {"kind": error_kind(err), "message": str(err)}
    found = f"expected to start a process for this rank, found {err!r}: see the limits on processes and memory"
    return {"kind": TrainingFailed.__name__, "message": found}


def signal_rank(pid: int, number: signal.Signals, *, alive: bool) -> None:
    """Signal the process group of a rank. A rank that is `alive` and has not made its group yet is signalled alone."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            if alive:
                os.kill(pid, number)


def is_running(pid: int, *, started_by: float = math.inf) -> bool:
    """Return whether a process runs that had this id at `started_by`. One that has ended, but was not reaped, does not."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.create_time() <= started_by and process.status() != psutil.STATUS_ZOMBIE
    return False
