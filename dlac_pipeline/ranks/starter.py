"""Starts the ranks of a job, attempt after attempt: through a fork server, or each as a new Python.

In: what differs in a rank's environment, and the file of its output. Out: the rank's process. The server is
`dlac_pipeline/ranks/fork_server.py`; this is its supervisor's side.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from catalog.errors import TrainingFailed
from dlac_pipeline.ranks.group import HANG, RankProcess, environment_of, signal_group, signal_name, spawn_rank
from dlac_pipeline.ranks.rank import held_signals
from dlac_pipeline.spec import JobSpec

_POLL_S = 0.01
_DIES_WITHIN_S = 5.0
"""What a killed server gets, and ranks that die with it."""
_LOG_BYTES = 2**20
"""Of launches before, which the log keeps."""


class RankStarter:
    """Starts the ranks of one job, attempt after attempt; begins another server when one is gone."""

    def __init__(self) -> None:
        self._server: _Server | None = None

    def __call__(self, spec: JobSpec, place: dict[str, str], log: Path) -> RankProcess:
        """As `ranks.group.Starter`."""
        server = self._served(spec)
        return spawn_rank(spec, place, log) if server is None else server.start(place, log)

    def begin(self, spec: JobSpec) -> None:
        """Let a server import what ranks will need, before it is known whether there will be any; where that can be."""
        with suppress(OSError):  # there is no such place yet, or it is away: that is told where it is looked at
            if Path(spec.launch.script).is_file():
                self._served(spec)

    def _served(self, spec: JobSpec) -> _Server | None:
        """The server, or another one if it is gone; its log is in the run's folder. None: ranks are spawned."""
        if spec.launch.start == "spawn" or sys.platform != "linux":
            return None
        if self._server is None or self._server.gone:
            self.close()
            folder = Path(spec.checkpoint.local) / spec.run
            folder.mkdir(exist_ok=True)
            self._server = _Server(spec, folder / f"fork-server-{socket.gethostname()}.log")
        return self._server

    def close(self) -> None:
        """Nothing is started any more; ranks that run would end."""
        if self._server is not None:
            self._server.close()


class _Server:
    """One server; what it says of each rank is known by the number under which that was asked for, as process ids come again."""

    def __init__(self, spec: JobSpec, log: Path) -> None:
        """Start to import; `log` takes what libraries print meanwhile."""
        environment = {"OPENBLAS_NUM_THREADS": "1", **environment_of(spec)}  # its threads would begin at import
        command = [sys.executable, "-m", "dlac_pipeline.ranks.fork_server", spec.launch.script, *spec.launch.args]
        self.patience_s = max(spec.launch.hang_timeout_s, spec.launch.start_timeout_s)
        """Seconds that it gets to import everything, and to start a rank then."""
        self.overdue = False
        """Whether it did not."""
        self._log = log
        self.ended_by: signal.Signals | None = None
        """What its supervisor has ended it by."""
        self._said: list[dict[str, Any]] = []
        self._rest = b""
        with log.open("ab") as stream, held_signals():
            if stream.tell() > _LOG_BYTES:
                stream.truncate(0)
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                process_group=0,
                bufsize=0,
            )
        self._asking, self._told = _pipes_of(self._process)
        os.set_blocking(self._told.fileno(), False)

    @property
    def gone(self) -> bool:
        """Whether it has ended, and all ranks with it."""
        return self.ended_by is not None or self._process.poll() is not None

    @property
    def why_gone(self) -> dict[str, Any]:
        """Of a server that is gone, as the fields of `Exit`; empty: its supervisor had no more need of it."""
        if self.overdue:
            silent = f"no sign of life of the fork server for {self.patience_s:.0f} s: its log is {self._log}"
            return {"kind": HANG, "message": silent}
        if self.ended_by is not None:
            return {}
        code = self._process.returncode
        how = f"exit status {code}" if code >= 0 else signal_name(-code)
        found = (
            f"expected a fork server to start this rank, found that it ended by {how} before: its log is {self._log}"
        )
        return {"kind": TrainingFailed.__name__, "message": found}

    def start(self, place: dict[str, str], log: Path) -> _Forked:
        """Start a rank, as soon as everything is imported."""
        index = len(self._said)
        self._said.append({})
        with suppress(BrokenPipeError):  # then the rank has ended as well
            self._asking.write(json.dumps({"index": index, "place": place, "log": str(log)}).encode() + b"\n")
        return _Forked(self, index)

    def said(self, index: int) -> dict[str, Any]:
        """Of the index-th rank: `pid` once it has started, `code` once it has ended, `reason` if it could not be started."""
        while not self._told.closed and (read := self._told.read(65536)):
            *lines, self._rest = (self._rest + read).split(b"\n")
            for message in map(json.loads, lines):
                self._said[message.pop("index")].update(message)
        return self._said[index]

    def end(self, number: signal.Signals) -> None:
        """End it, and with it all its ranks; those that it has not started count as ended by this signal."""
        if not self.gone:
            self.ended_by = number
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel may hold it: it hangs in a file system
                self._process.wait(_DIES_WITHIN_S)

    def close(self) -> None:
        """End it."""
        self.end(signal.SIGKILL)
        self._asking.close()
        self._told.close()


def _pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


class _Forked:
    """A rank that the server has started, or will."""

    def __init__(self, server: _Server, index: int) -> None:
        self._server = server
        self._index = index
        self._deadline = time.monotonic() + server.patience_s

    @property
    def pid(self) -> int:
        """Waits until it is known; 0: it never started."""
        while not self.started:
            time.sleep(_POLL_S)
        pid: int = self._said().get("pid", 0)
        return pid

    @property
    def started(self) -> bool:
        """Whether its process id is known, or that it never will be."""
        return "pid" in self._said() or self.poll() is not None

    def poll(self) -> int | None:
        """Its exit status; negative: the signal that killed it; None: it runs, or will."""
        server, gone, said = self._server, self._server.gone, self._said()  # in this order: what it said last is read
        if "code" in said:
            return int(said["code"])
        if not gone and ("pid" in said or time.monotonic() < self._deadline):
            return None
        if not gone:
            server.end(signal.SIGKILL)
            server.overdue = True
        if server.overdue:
            return 1
        if "pid" in said:
            return -signal.SIGKILL
        return 1 if server.ended_by is None else -server.ended_by

    def reason(self) -> dict[str, Any]:
        """Why it never started, or why its server was ended."""
        said = self._said()
        if "reason" in said:
            reason: dict[str, Any] = said["reason"]
            return reason
        unexplained = self._server.overdue or "pid" not in said
        return self._server.why_gone if unexplained and "code" not in said and self.poll() is not None else {}

    def gone(self, within_s: float) -> bool:
        """Whether it has ended; waits for that, so long at most. A server that has not told by then is ended."""
        if not _until(lambda: self.poll() is not None, within_s):
            self._server.end(signal.SIGKILL)
        said = self._said()
        return "pid" not in said or "code" in said or _until(lambda: not _runs(said["pid"]), _DIES_WITHIN_S)

    def signal(self, number: signal.Signals) -> None:
        """Signal its process group; if it has none by now, it never starts, nor do others."""
        said = self._said()
        if "pid" in said:
            signal_group(said["pid"], number)
        elif "reason" not in said:
            self._server.end(number)

    def _said(self) -> dict[str, Any]:
        return self._server.said(self._index)


def _until(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _runs(pid: int) -> bool:
    """Whether a process is there that has not ended; it may have nobody who asks how it did."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
