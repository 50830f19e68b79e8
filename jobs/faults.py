"""Real faults for the demo: find the processes of a training run from outside, and kill them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from dlac_pipeline.progress import Progress, read_progress
from dlac_pipeline.rank import LAUNCH_VARIABLE


class LiveRun:
    """The processes and the progress of one training run on this machine."""

    def __init__(self, store: str, run: str) -> None:
        self._folder = Path(store) / run

    def progress(self) -> Progress | None:
        """The last sign of life of rank 0 of the newest launch."""
        launches = sorted(self._folder.glob("launch-*/"), key=lambda folder: folder.stat().st_mtime)
        return read_progress(launches[-1], 0) if launches else None

    def step(self) -> int:
        """The last finished optimizer step of the newest launch."""
        progress = self.progress()
        return 0 if progress is None else progress.step

    def rank(self, number: int) -> psutil.Process | None:
        """The living process of a rank."""
        for process in psutil.process_iter(["cmdline"]):
            if "dlac_pipeline.rank" not in (process.info["cmdline"] or []):
                continue
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            mine = Path(environment.get(LAUNCH_VARIABLE, "")).parent == self._folder
            if mine and environment.get("RANK") == str(number):
                return process
        return None

    def kill_rank(self, number: int) -> bool:
        """SIGKILL a rank in the middle of an optimizer step; false if there is none to kill."""
        process = self.rank(number)
        if process is None:
            return False
        self._sleep_into_a_step()
        process.send_signal(signal.SIGKILL)
        return True

    def kill_dagster_run(self) -> bool:
        """SIGKILL the process of the Dagster run: the parent of the supervisor, which is the parent of the ranks."""
        process = self.rank(0)
        supervisor = None if process is None else process.parent()
        worker = None if supervisor is None else supervisor.parent()
        if worker is None:
            return False
        worker.send_signal(signal.SIGKILL)
        return True

    def _sleep_into_a_step(self) -> None:
        before, started = self.step(), time.monotonic()
        while self.step() == before and time.monotonic() - started < 10:
            time.sleep(0.005)
        time.sleep(0.05)
