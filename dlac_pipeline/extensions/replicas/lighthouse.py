"""Lighthouse of the replica groups: torchft's server, which forms their quorums, in another process.

The supervisor starts a dead lighthouse again. Each one has another address, which it writes to the launch folder: a group
that reached a new lighthouse with the quorum of the one before would wait for peers that do not know that quorum.
"""

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from http.client import HTTPException
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from setproctitle import setproctitle

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.ranks.addresses import LOOPBACK
from dlac_pipeline.elastic.ranks.rank import end_with_supervisor, held_signals, without_main_module
from dlac_pipeline.extensions.replicas.rank import (
    HEARTBEAT_TIMEOUT_S,
    limit_s,
    open_directly,
    read_lighthouse,
    url_host,
    write_lighthouse,
)
from dlac_pipeline.lakehouse.errors import TrainingFailed
from dlac_pipeline.spec.job_spec import JobSpec

_TICK_MS = 10
_ENDS_WITHIN_S = 5.0
LOOK_S = 1.0
ANSWERS_WITHIN_S = 5.0
"""Seconds within which a lighthouse answers. One that does not twice in a row hangs, and is killed."""
_START_SHARE = 0.5
"""Limit for the start of a lighthouse, as a share of that for groups, which wait for the lighthouse that replaces it."""


class Lighthouse:
    """Lighthouse of one attempt."""

    def __init__(self, spec: JobSpec, folder: Path, address: str = LOOPBACK) -> None:
        """`folder` is the launch folder, `address` that of this node for the groups."""
        self._spec, self._folder, self._address = spec, folder, address
        self._process: BaseProcess | None = None
        self._is_killed = False
        """True if the process was killed because it did not start or answer."""
        self._ended = threading.Event()

    def start(self) -> None:
        """Start its process."""
        fork_server.start_server(self._spec)
        stragglers_s = limit_s(self._spec.launch)  # as long as in a collective
        context: Any = multiprocessing.get_context(fork_server.START_METHODS[self._spec.launch.start])
        process = context.Process(
            target=_serve, args=(self._spec.run, str(self._folder), self._address, stragglers_s), daemon=True
        )
        with held_signals(), without_main_module():
            process.start()
        self._process, self._is_killed = process, False
        threading.Thread(target=self._kill_hung, args=(process,), name="watch of the lighthouse", daemon=True).start()

    @property
    def has_started(self) -> bool:
        """True if its process has run as a lighthouse. It may have died since."""
        found = read_lighthouse(self._folder)
        return found is not None and self._process is not None and found.pid == self._process.pid

    def restart_dead(self) -> str:
        """Start a dead lighthouse again, and return how it died. Empty: it runs. Raise `TrainingFailed` if it never ran."""
        process = self._process
        if process is None or process.exitcode is None:
            return ""
        had_started, was_killed = self.has_started, self._is_killed
        self.start()
        if not had_started:
            within_s = start_limit_s(self._spec)
            ended = (
                f"not started after {within_s:.0f} s" if was_killed else f"ended with exit status {process.exitcode}"
            )
            raise TrainingFailed(f"expected torchft's lighthouse to start, found it {ended}: see the fork server's log")
        return f"exit status {process.exitcode}"

    def end(self) -> None:
        """End it."""
        self._ended.set()
        if self._process is not None:
            self._process.kill()
            self._process.join(_ENDS_WITHIN_S)

    def _kill_hung(self, process: BaseProcess) -> None:
        """Kill a lighthouse that does not start or answer, so that `restart_dead` finds it dead. No group would step until then.

        The time of its start is the number of looks: this process makes none while it is suspended.
        """
        silent, starting_s, starts_within_s = 0, 0.0, start_limit_s(self._spec)
        while silent < 2 and starting_s < starts_within_s:
            if self._ended.wait(LOOK_S) or self._process is not process:
                return
            found = read_lighthouse(self._folder)
            if found is None or found.pid != process.pid:
                starting_s += LOOK_S
            else:
                silent = 0 if answers(found.address) else silent + 1
        if self._process is process:
            self._is_killed = True
            process.kill()


def start_limit_s(spec: JobSpec) -> float:
    """Return the seconds within which a lighthouse starts."""
    return _START_SHARE * spec.launch.start_timeout_s


def make_server(address: str = LOOPBACK, *, port: int = 0, stragglers_s: float) -> Any:
    """Return torchft's server at an address. Port 0: any free one. A quorum waits `stragglers_s` for groups that are alive."""
    os.environ.setdefault("RUST_LOG", "error")  # it would write lines for each step
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind=f"{url_host(address)}:{port}",
        min_replicas=1,
        join_timeout_ms=int(stragglers_s * 1000),
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=int(HEARTBEAT_TIMEOUT_S * 1000),
    )


def address_of(server: Any, address: str = LOOPBACK) -> str:
    """Return the URL of a server at an address, for the groups."""
    return f"http://{url_host(address)}:{urlsplit(server.address()).port}"


def answers(address: str) -> bool:
    """Return whether a lighthouse answers in time. The system accepts connections for one that hangs."""
    with suppress(OSError, HTTPException), open_directly(f"{address}/status", ANSWERS_WITHIN_S):
        return True
    return False


def _serve(run: str, folder: str, address: str, stragglers_s: float) -> None:
    """Serve until the supervisor ends this process, or ends itself."""
    os.setpgid(0, 0)
    end_with_supervisor()
    setproctitle(f"dlac {run} lighthouse")
    server = make_server(address, stragglers_s=stragglers_s)
    write_lighthouse(Path(folder), address_of(server, address))
    while True:
        signal.pause()
