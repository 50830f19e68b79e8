"""The processes and the progress of a training run on this node, from outside."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from dlac_pipeline.elastic.ranks.launch_folder import pid_file
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat, read_heartbeat


class LiveRun:
    """The processes and the progress of one training run on this node."""

    def __init__(self, store: str, run: str) -> None:
        self._folder = Path(store) / run

    def progress(self) -> RankHeartbeat | None:
        """The last heartbeat of rank 0 of the newest launch."""
        launches = sorted(self._folder.glob("launch-*/"), key=lambda folder: folder.stat().st_mtime)
        return read_heartbeat(launches[-1], 0) if launches else None

    def step(self) -> int:
        """The last finished optimizer step of the newest launch."""
        progress = self.progress()
        return 0 if progress is None else progress.step

    def rank(self, number: int) -> psutil.Process | None:
        """The living process of a rank of the newest launch."""
        launches = sorted(self._folder.glob("launch-*/"), key=lambda folder: folder.stat().st_mtime)
        try:
            return psutil.Process(int(pid_file(launches[-1], number).read_text())) if launches else None
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return None

    def supervisor(self) -> psutil.Process | None:
        """Return the supervisor's process. Its ranks are its children, or those of its fork server."""
        process = self.rank(0)
        above = [] if process is None else process.parents()
        return next(
            (one for one in above if "dlac_pipeline.extensions.clusters.supervisor_process" in one.cmdline()), None
        )

    def kill_rank(self, number: int) -> bool:
        """SIGKILL a rank in the middle of an optimizer step. Return False if no rank exists."""
        process = self.rank(number)
        if process is None:
            return False
        self._sleep_into_a_step()
        process.send_signal(signal.SIGKILL)
        return True

    def kill_dagster_run(self) -> bool:
        """SIGKILL the process of the Dagster run: the parent of the supervisor, to which the ranks belong."""
        supervisor = self.supervisor()
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
