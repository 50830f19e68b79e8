"""Lighthouse of replica groups without a supervisor. Each group watches it, and starts another one when none runs.

    python -m dlac_pipeline.extensions.replicas.shared_lighthouse FOLDER RUN GROUPS STRAGGLERS_S

Its process has a lock, so there is one at a time. It belongs to no group, and ends once all groups have.
"""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from setproctitle import setproctitle

from dlac_pipeline.extensions.replicas.lighthouse import address_of, answers, make_server, start_limit_s
from dlac_pipeline.extensions.replicas.rank import is_held, limit_s, read_lighthouse, write_lighthouse
from dlac_pipeline.lakehouse.durable_io import lock_at_once
from dlac_pipeline.spec.job_spec import JobSpec

_log = logging.getLogger(__name__)
_LOCK = "lighthouse.lock"
_LOOK_S = 0.1
_ASK_EVERY_S = 1.0
_GROUPS_GONE_S = 0.5
_MOST_SILENT = 2
"""Questions in a row without an answer after which a lighthouse hangs."""


class LighthouseWatch:
    """Watch of the lighthouse by a group, in a thread of its first rank."""

    def __init__(self, spec: JobSpec, folder: Path, *, also: Callable[[], None]) -> None:
        """`folder` is the launch folder. `also` is called with each look."""
        self._spec, self._folder, self._also = spec, folder, also
        self._closed = threading.Event()
        self._looking = threading.Lock()
        self._silent, self._asked_at = 0, time.monotonic()
        """Questions in a row without an answer, and the moment of the last one."""
        self._process: subprocess.Popen[bytes] | None = None
        """The lighthouse that this group has started last."""
        threading.Thread(target=self._watch, name="watch of the lighthouse", daemon=True).start()

    def close(self) -> None:
        """End the watch: `also` is not called again. The lighthouse runs for all further groups."""
        with self._looking:
            self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._look()
            except OSError as err:  # a full disk passes, and a group without this watch would wait for ever
                _log.warning("the lighthouse of the replica groups could not be looked at: %s", err)
                self._closed.wait(_ASK_EVERY_S)

    def _look(self) -> None:
        with self._looking:
            if not self._closed.is_set():
                self._also()
        self._start_if_none_runs()
        found = read_lighthouse(self._folder)
        if found is None or time.monotonic() - self._asked_at < _ASK_EVERY_S:
            return
        self._silent = 0 if answers(found.address) else self._silent + 1
        self._asked_at = time.monotonic()
        if self._silent == _MOST_SILENT:
            self._silent = 0
            self._kill(found.pid)

    def _kill(self, pid: int) -> None:
        """Kill a lighthouse that hangs. Another process may have its number by now, if it has died."""
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if any(Path(each.path).name == _LOCK for each in process.open_files()):
                process.kill()

    def _start_if_none_runs(self) -> None:
        """Start a lighthouse unless one has the lock, which its process takes over from this one. One that is late is killed."""
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not lock_at_once(descriptor, fcntl.LOCK_EX):
                return
            if self._process is not None:
                self._process.wait()
            launch = self._spec.launch
            facts = [str(self._folder), self._spec.run, str(launch.replicas), str(limit_s(launch))]
            with (self._folder / "lighthouse.log").open("ab") as log:
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", "dlac_pipeline.extensions.replicas.shared_lighthouse", *facts],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[descriptor],
                    start_new_session=True,
                )
        finally:
            os.close(descriptor)
        deadline = time.monotonic() + start_limit_s(self._spec)
        while process.poll() is None and not self._has_started(process.pid):
            if time.monotonic() > deadline:
                process.kill()
            if self._closed.wait(_LOOK_S):
                return

    def _has_started(self, pid: int) -> bool:
        found = read_lighthouse(self._folder)
        return found is not None and found.pid == pid


def main(folder: str, run: str, groups: str, stragglers_s: str) -> None:
    """Serve until no group is left."""
    setproctitle(f"dlac {run} lighthouse")
    server = make_server(stragglers_s=float(stragglers_s))
    write_lighthouse(Path(folder), address_of(server))
    while any(is_held(Path(folder), group) for group in range(int(groups))):
        time.sleep(_GROUPS_GONE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
