"""The benchmark's side of a loader's process: starts `host` in the loader's environment and sends it commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from benchmarks.peer_loaders.protocol import Job

_ROOT = Path(__file__).parents[2]
_IMPORT_LIMIT_S = 120.0


class LoaderFailed(Exception):
    """The loader could not run a command. The message is the loader's own."""


class LoaderProcess:
    """A loader's process."""

    def __init__(self, name: str, python: Path, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._errors = (scratch / f"{name}.host").open("w")
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peer_loaders.host", name],
            cwd=scratch,  # an empty folder: datasets searches the current one
            env=environment_of(scratch),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.about = self._answer(_IMPORT_LIMIT_S)
        if "failed" in self.about:
            raise LoaderFailed(f"cannot be imported: {self.about['failed']}")

    def convert(self, job: Job, limit_s: float) -> dict[str, float]:
        """Convert the rows, and return bytes and seconds."""
        measured: dict[str, float] = self._ask("convert", [job], limit_s)[0]["result"]
        return measured

    def consume(self, jobs: list[Job], limit_s: float) -> list[dict[str, Any]]:
        """Run the ranks of one launch, and return each one's measurements, or an empty dict for one that had to die."""
        return [rank["result"] for rank in self._ask("consume", jobs, limit_s)]

    def close(self) -> None:
        """End the process and all processes that it started."""
        with contextlib.suppress(BrokenPipeError, ProcessLookupError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
        self._errors.close()

    def _ask(self, what: str, jobs: list[Job], limit_s: float) -> list[dict[str, Any]]:
        command = {"do": what, "jobs": [dataclasses.asdict(job) for job in jobs], "limit_s": limit_s}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        ranks: list[dict[str, Any]] = self._answer(limit_s + 30)["ranks"]
        for rank, job in zip(ranks, jobs, strict=True):
            expected = -signal.SIGKILL if job.die_at and what == "consume" else 0
            if rank["exit"] is not None and rank["exit"] != expected:
                raise LoaderFailed(rank["error"] or f"rank {job.rank} ended with {rank['exit']}")
        for rank in ranks:
            if rank["exit"] is None:
                raise LoaderFailed(rank["error"])
        return ranks

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            line = ""
        if not line:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise LoaderFailed(f"no answer from the process of {self.name!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def environment_of(scratch: Path) -> dict[str, str]:
    """Return the environment variables of a loader's process: caches in a folder, no network, one thread."""
    caches = {name: str(scratch / "cache") for name in ("HF_HOME", "DATA_OPTIMIZER_CACHE_FOLDER", "LITDATA_CACHE_DIR")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    one_thread = {"OMP_NUM_THREADS": "1"}  # torch's own threads: a loader has its workers
    return {**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(scratch), **caches, **quiet, **one_thread}
