"""Ranks that start at once: forked from a process that has imported their libraries, as multiprocessing's fork server does.

Importing PyTorch and the rest takes seconds of every launch, and with them most of a recovery. Here it is done once, beside the
imports of the supervisor itself: `python -m dlac_pipeline.ranks.fork_server SCRIPT ARGS...`, one per supervisor, with whose
death it dies. Lines of JSON on its standard input are ranks to be started; on its standard output it says which process each
became, and how it ended.

A fork copies the calling thread only. So the server runs no other: it imports, and never computes. If a library has begun threads
of its own at import (Arrow's allocator knows how to be forked), it says so and forks nothing: the ranks are spawned then.

The signals that end a launch are held back here since it was started (`rank.held_signals`), and so they are in a rank until it is
about to run its script, whose they are. Little is imported by this module itself: a rank is to find what a new Python would.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import selectors
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from dlac_pipeline.ranks import rank
from dlac_pipeline.ranks.ahead import import_ahead
from dlac_pipeline.ranks.rank import RUN_VARIABLE, SUPERVISOR_VARIABLE, die_with_parent, reason_not_started

_FORKABLE_THREADS = frozenset({"jemalloc_bg_thd"})


def main() -> int:
    """Serve, and in a forked process: be the rank. Returns the exit status."""
    die_with_parent(int(os.environ[SUPERVISOR_VARIABLE]))
    setproctitle(f"dlac {os.environ[RUN_VARIABLE]} fork server")
    script, *arguments = sys.argv[1:]
    asked, told = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # libraries print
    import_ahead(Path(script))
    server = os.getpid()  # asked in the fork, it could be another's already
    started: dict[int, int] = {}
    gc.collect()
    gc.freeze()  # what is shared stays shared
    for request in _requests(asked, told, started):
        try:
            pid = os.fork() if _forkable() else _spawn(request, script, arguments)
        except OSError as err:
            _tell(told, {"index": request["index"], "reason": reason_not_started(err), "code": 1})
            continue
        if pid == 0:
            os.close(asked)
            os.close(told)
            return _become_rank(request, script, arguments, server)
        _lead_a_group(pid)  # by both sides: whoever is told of the process may signal its group at once
        started[pid] = request["index"]
        _tell(told, {"index": request["index"], "pid": pid})
    return 0


def _forkable() -> bool:
    """Whether this process has no thread that would be missing in a fork."""
    strangers = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            name = (task / "comm").read_text().strip()
            if int(task.name) != os.getpid() and name not in _FORKABLE_THREADS:
                strangers.add(name)
    if strangers:
        sys.stderr.write(f"expected no thread behind imports, found {sorted(strangers)!r}: a rank is spawned\n")
    return not strangers


def _requests(asked: int, told: int, started: dict[int, int]) -> Iterator[dict[str, Any]]:
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
                _tell_of_ended(told, started)
            if asked in ready:
                read = os.read(asked, 65536)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                yield from map(json.loads, lines)


def _tell_of_ended(told: int, started: dict[int, int]) -> None:
    with suppress(ChildProcessError):  # there is none
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            index = started.pop(ended[0], None)  # the next process with this id is another one
            if index is not None:
                _tell(told, {"index": index, "code": os.waitstatus_to_exitcode(ended[1])})


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
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    sys.argv = ["dlac_pipeline.ranks.rank", script, *arguments]
    # Libraries report what the frozen objects keep alive at the end, into the log, after the traceback of the script.
    atexit.register(gc.unfreeze)
    rank.main()
    return 0


def _lead_a_group(pid: int) -> None:
    with suppress(PermissionError, ProcessLookupError):  # the other side has done it, or it is gone
        os.setpgid(pid, pid)


def _spawn(request: dict[str, Any], script: str, arguments: list[str]) -> int:
    """A new Python, reaped as forked ranks are; nothing else may ask how it ended."""
    environment = {**os.environ, **request["place"], SUPERVISOR_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-m", "dlac_pipeline.ranks.rank", script, *arguments]
    opened = (os.POSIX_SPAWN_OPEN, 1, request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    output = [opened, (os.POSIX_SPAWN_DUP2, 1, 2)]
    return os.posix_spawn(sys.executable, command, environment, file_actions=output, setpgroup=0)


if __name__ == "__main__":
    sys.exit(main())
