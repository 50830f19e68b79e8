"""Supervisor processes that tests launch, and waits for their events."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from tests.forked import Forked


class Launch:
    """A supervisor process and its events."""

    def __init__(self, request: dict[str, Any], log: Path, under: Sequence[str] = ()) -> None:
        """`under` is a command that runs another one."""
        self._log = log
        start = subprocess.Popen if under else Forked
        with log.open("wb") as stdout, log.with_suffix(".err").open("wb") as stderr:
            self.process: subprocess.Popen[bytes] = start(
                [*under, sys.executable, "-m", "dlac_pipeline.extensions.clusters.supervisor_process"],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.stdin: IO[bytes] = self.process.stdin
        self.stdin.write(json.dumps(request).encode() + b"\n")
        self.stdin.flush()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def stderr(self) -> str:
        """The text on standard error."""
        return self._log.with_suffix(".err").read_text()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for `count` events of a kind, and return the last one."""
        wait_until(lambda: len(self.of(kind)) >= count or self.process.poll() is not None, what=f"{kind} event")
        assert len(self.of(kind)) >= count, (
            f"ended with {self.process.poll()}: {self.events[-3:]} {self.stderr[-2000:]}"
        )
        return self.of(kind)[count - 1]

    def wait(self) -> int:
        """Wait for its end, and return the exit status."""
        return self.process.wait(timeout=600)

    def ranks(self) -> list[psutil.Process]:
        """Return the current ranks of it or of its fork server, by rank."""
        if self.process.poll() is not None:
            return []  # its process id may be another one's by now
        with suppress(psutil.NoSuchProcess):
            titles = {process: " ".join(process.cmdline()) for process in psutil.Process(self.process.pid).children()}
            servers = [
                process for process, title in titles.items() if re.search("fork.server", title)
            ]  # its title once it runs
            forked = [process for server in servers for process in server.children()]
            spawned = [
                process
                for process, title in titles.items()
                if re.search(r"dlac_pipeline\.ranks\.rank|^dlac \S+ rank ", title)
            ]
            return sorted([*forked, *spawned], key=lambda process: process.pid)
        return []

    def signal_all(self, number: signal.Signals) -> None:
        """Signal the supervisor and all its ranks."""
        ranks = self.ranks()
        self.process.send_signal(number)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    def destroy(self) -> None:
        """Send SIGKILL to all processes. A rank dies with its supervisor."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()
        self.stdin.close()


def wait_until(holds: Callable[[], bool], *, what: str, within_s: float = 300.0, pause_s: float = 0.02) -> None:
    """Poll until a condition holds, every `pause_s` and in a fifth of the time at most. Fail after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        started = time.thread_time()
        if holds():
            return
        assert time.monotonic() < deadline, f"waited {within_s:.0f} s in vain for: {what}"
        time.sleep(max(pause_s, 4 * (time.thread_time() - started)))
