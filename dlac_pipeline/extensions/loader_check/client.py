"""The other side of a loader's process: starts `host` in the loader's environment and sends it commands."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlac_pipeline.extensions.loader_check.protocol import Job

_PACKAGE = Path(__file__).parents[2]
_IMPORT_LIMIT_S = 120.0


class LoaderFailed(Exception):
    """The loader could not run a command. The message is the loader's own."""


class LoaderEnded(LoaderFailed):
    """The loader's process has ended, or was ended because it did not answer. It runs no more commands."""


class LoaderTooSlow(LoaderFailed):
    """A command of the loader did not end in time."""


class LoaderProcess:
    """A loader's process, in an empty folder in which it may leave files."""

    def __init__(
        self, source: str, python: Path, scratch: Path, *, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """`source` is a file or a module, which is searched in the PYTHONPATH of `environment`.

        Raises `LoaderFailed` if it cannot be imported.
        """
        scratch.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._is_busy = self._is_ended = False
        self._errors = (scratch / f"{name}.host").open("a")
        self._process = subprocess.Popen(
            [str(python), "-m", f"{__package__}.host", source],
            cwd=scratch,  # an empty folder: datasets searches the current one
            env=_environment(scratch, environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.about = self._answer(_IMPORT_LIMIT_S)
            if "failed" in self.about:
                raise LoaderFailed(f"cannot be imported: {self.about['failed']}")
        except BaseException:  # also of a signal's handler
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, also between two commands."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._is_ended or os.waitid(os.P_PID, self._process.pid, ended) is not None

    def convert(self, job: Job, limit_s: float) -> dict[str, float]:
        """Convert the rows, and return bytes and seconds."""
        measured: dict[str, float] = self._ask("convert", [job], limit_s)[0]["result"]
        return measured

    def consume(self, jobs: list[Job], limit_s: float) -> list[dict[str, Any]]:
        """Run the ranks of one launch, and return each one's measurements, or an empty dict for one that had to die."""
        return [rank["result"] for rank in self._ask("consume", jobs, limit_s)]

    def close(self) -> None:
        """End the process and its group, also in the middle of a command.

        Processes that it started in another session or group remain.
        """
        with contextlib.suppress(BrokenPipeError, ProcessLookupError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._is_busy:
            self._process.terminate()
        until, ended = time.monotonic() + 5, os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self._process.pid, ended) is None and time.monotonic() < until:
            time.sleep(0.005)
        os.killpg(self._process.pid, signal.SIGKILL)  # the number is its own, because the process is not waited for
        self._process.wait(5)
        self._errors.close()

    def _ask(self, what: str, jobs: list[Job], limit_s: float) -> list[dict[str, Any]]:
        command = {"do": what, "jobs": [dataclasses.asdict(job) for job in jobs], "limit_s": limit_s}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as err:
            self._kill_group()
            self._is_ended = True
            raise LoaderEnded(f"the process of {self.name!r} has ended") from err
        ranks: list[dict[str, Any]] = self._answer(limit_s + 30)["ranks"]
        for rank, job in zip(ranks, jobs, strict=True):
            if rank["exit"] not in (None, job.exit_status):
                raise LoaderFailed(rank["error"] or f"rank {job.rank} ended with exit status {rank['exit']}")
        for rank in ranks:
            if rank["exit"] is None:
                raise LoaderTooSlow(rank["error"])
        return ranks

    def _answer(self, limit_s: float) -> dict[str, Any]:
        self._is_busy = True
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            line = ""
        self._is_busy = False
        if not line:
            self._kill_group()
            errors = Path(self._errors.name).read_text(errors="replace").split("\n")
            last = next((f": {each}" for each in reversed(errors) if each.strip()), "")
            self._is_ended = True
            raise LoaderEnded(f"the process of {self.name!r} did not answer{last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill_group(self) -> None:
        """Kill processes that are left: the next uses the same folder. The number is not used again until it is waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def _environment(scratch: Path, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the loader's environment: of this one DLAC alone is added, because its other packages may be another version's."""
    package = scratch / ".import" / _PACKAGE.name
    package.parent.mkdir(exist_ok=True)
    if not package.is_symlink():  # another process may share the folder
        package.symlink_to(_PACKAGE)
    environment = {**os.environ, "TMPDIR": str(scratch), **changes}
    paths = str(scratch / ".import"), environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
