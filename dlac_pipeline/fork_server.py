"""Ranks that start at once: forked from a process that has imported their libraries, as multiprocessing's fork server does.

Importing PyTorch and the rest takes seconds of every launch, and with them most of a recovery. Here it is done once, beside the
first claim: `python -m dlac_pipeline.fork_server SCRIPT ARGS...`, one per supervisor, with whose death it dies. Lines of JSON on
its standard input are ranks to be started; on its standard output it says which process each became, and how it ended.

A fork copies the calling thread only. So the server runs no other: it imports, and never computes. If a library has begun threads
of its own at import (Arrow's allocator knows how to be forked), it says so and starts nothing: the ranks are spawned then.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy

from dlac_pipeline import rank
from dlac_pipeline.launch import RankProcess, environment_of, signal_group, spawn_rank
from dlac_pipeline.rank import SUPERVISOR_VARIABLE, die_with_parent
from dlac_pipeline.spec import JobSpec

_MODULES = ("dlac_pipeline.worker", "dlac_pipeline.dataset")
_HEAVY = ("deepspeed", "transformers", "accelerate", "datasets")
"""Imported ahead where the script names them. Not beside accelerators: they may open the driver, which survives no fork."""
_ACCELERATORS = ("/dev/nvidia0", "/dev/kfd", "/dev/accel0", "/dev/davinci0")
_FORKABLE_THREADS = frozenset({"jemalloc_bg_thd"})
_POLL_S = 0.01


class RankStarter:
    """Starts the ranks of one job, attempt after attempt; begins another server when one is gone."""

    def __init__(self) -> None:
        self._server: _Server | None = None

    def __call__(self, spec: JobSpec, place: dict[str, str], log: Path) -> RankProcess:
        """As `launch.Starter`."""
        if spec.launch.start == "spawn" or sys.platform != "linux":
            return spawn_rank(spec, place, log)
        if self._server is None or self._server.gone:
            self.close()
            self._server = _Server(spec, log.parent / "fork-server.log")
        return self._server.start(place, log)

    def close(self) -> None:
        """Nothing is started any more; ranks that run would end."""
        if self._server is not None:
            self._server.close()


class _Server:
    """The supervisor's side of one server."""

    def __init__(self, spec: JobSpec, log: Path) -> None:
        """Start to import; `log` takes what libraries print meanwhile."""
        environment = {"OPENBLAS_NUM_THREADS": "1", **environment_of(spec)}  # its threads would begin at import
        command = [sys.executable, "-m", "dlac_pipeline.fork_server", spec.launch.script, *spec.launch.args]
        self._patience_s = spec.launch.hang_timeout_s
        self._asked = 0
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._ended_by = signal.SIGKILL
        self._rest = b""
        with log.open("ab") as stream:
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
        return self._process.poll() is not None

    def start(self, place: dict[str, str], log: Path) -> _Forked:
        """Start a rank, as soon as everything is imported."""
        index, self._asked = self._asked, self._asked + 1
        with suppress(BrokenPipeError):  # then the rank has ended as well
            self._asking.write(json.dumps({"place": place, "log": str(log)}).encode() + b"\n")
        return _Forked(self, index, time.monotonic() + self._patience_s)

    def pid_of(self, index: int) -> int | None:
        """The process that the index-th rank became; None: none yet."""
        self._listen()
        return self._started[index] if index < len(self._started) else None

    def code_of(self, index: int) -> int | None:
        """The exit status of the index-th rank; None: it runs."""
        pid = self.pid_of(index)
        code = None if pid is None else self._ended.get(pid)
        return -self._ended_by if code is None and self.gone else code

    def end(self, number: signal.Signals) -> None:
        """End it before it has started what it was asked to; those ranks count as ended by this signal."""
        self._ended_by = number
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it."""
        self.end(self._ended_by)
        self._asking.close()
        self._told.close()

    def _listen(self) -> None:
        while not self._told.closed and (read := self._told.read(65536)):
            *lines, self._rest = (self._rest + read).split(b"\n")
            for message in map(json.loads, lines):
                if "code" in message:
                    self._ended[message["pid"]] = message["code"]
                else:
                    self._started.append(message["pid"])


def _pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


class _Forked:
    """A rank that the server has started, or will."""

    def __init__(self, server: _Server, index: int, deadline: float) -> None:
        self._server = server
        self._index = index
        self._deadline = deadline

    @property
    def pid(self) -> int:
        """Waits until it is known; 0: it never started."""
        while (pid := self._server.pid_of(self._index)) is None and not self._server.gone:
            if time.monotonic() > self._deadline:
                self._server.end(signal.SIGKILL)
            time.sleep(_POLL_S)
        return pid or self._server.pid_of(self._index) or 0

    def poll(self) -> int | None:
        return self._server.code_of(self._index)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code

    def signal(self, number: signal.Signals) -> None:
        pid = self._server.pid_of(self._index)
        if pid is None:
            self._server.end(number)
        else:
            signal_group(pid, number)


def main() -> int:
    """Serve, and in a forked process: be the rank. Returns the exit status."""
    die_with_parent(int(os.environ[SUPERVISOR_VARIABLE]))
    script, *arguments = sys.argv[1:]
    asked, told = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # libraries print
    _import_ahead(Path(script))
    forks = _forkable()
    server = os.getpid()  # asked in the fork, it could be another's already
    gc.collect()
    gc.freeze()  # what is shared stays shared
    for request in _requests(asked, told):
        pid = os.fork() if forks else _spawn(request, script, arguments)
        if pid == 0:
            os.close(asked)
            os.close(told)
            return _become_rank(request, script, arguments, server)
        _lead_a_group(pid)  # by both sides: whoever is told of the process may signal its group at once
        _tell(told, {"pid": pid})
    return 0


def _import_ahead(script: Path) -> None:
    names = list(_MODULES)
    if not any(os.path.exists(device) for device in _ACCELERATORS):
        with suppress(OSError):
            names += [name for name in _HEAVY if _names(_text_of(script), name)]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as err:  # the rank will meet it, where somebody reads it
            sys.stderr.write(f"{name} could not be imported ahead: {err}\n")


def _text_of(script: Path) -> str:
    """The script, and the modules beside it that it imports."""
    text = script.read_text(errors="replace")
    beside = [one for one in script.parent.glob("*.py") if _names(text, one.stem)]
    return "\n".join([text, *(one.read_text(errors="replace") for one in beside)])


def _names(text: str, module: str) -> bool:
    return f"import {module}" in text or f"from {module}" in text


def _forkable() -> bool:
    tasks = Path("/proc/self/task")
    others = [(task / "comm").read_text().strip() for task in tasks.iterdir() if int(task.name) != os.getpid()]
    strangers = sorted(set(others) - _FORKABLE_THREADS)
    if strangers:
        sys.stderr.write(f"expected no thread behind imports, found {strangers!r}: ranks are spawned\n")
    return not strangers


def _requests(asked: int, told: int) -> Iterator[dict[str, Any]]:
    """What is asked for, until nobody asks any more; meanwhile tell of ranks that have ended."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        rest = b""
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                _tell_of_ended(told)
            if asked in ready:
                read = os.read(asked, 65536)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                yield from map(json.loads, lines)


def _tell_of_ended(told: int) -> None:
    with suppress(ChildProcessError):  # there is none
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(told, {"pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})


def _tell(told: int, message: dict[str, Any]) -> None:
    os.write(told, json.dumps(message).encode() + b"\n")


def _become_rank(request: dict[str, Any], script: str, arguments: list[str], server: int) -> int:
    """In the forked process, which goes on here as a new Python would."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _lead_a_group(os.getpid())
    with open(request["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {**request["place"], SUPERVISOR_VARIABLE: str(server)}
    numpy.random.seed()
    sys.argv = ["dlac_pipeline.rank", script, *arguments]
    rank.main()
    return 0


def _lead_a_group(pid: int) -> None:
    with suppress(PermissionError, ProcessLookupError):  # the other side has done it, or it is gone
        os.setpgid(pid, pid)


def _spawn(request: dict[str, Any], script: str, arguments: list[str]) -> int:
    environment = {**os.environ, **request["place"], SUPERVISOR_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-m", "dlac_pipeline.rank", script, *arguments]
    with open(request["log"], "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0).pid


if __name__ == "__main__":
    sys.exit(main())
