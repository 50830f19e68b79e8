"""The nodes of a run on this node: a supervisor each, started again when one ends, as an orchestrator does."""

import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dlac_pipeline.extensions.chaos.chaos_job import ChaosJob
from dlac_pipeline.extensions.chaos.ending_signals import signals_held
from dlac_pipeline.extensions.chaos.node_process import NodeProcess
from dlac_pipeline.extensions.chaos.strikes import send_signal
from dlac_pipeline.lakehouse.errors import LeftUnfinished, RunFinished, TrainingFailed, error_class, error_from_kind
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.liveness.heartbeat import read_heartbeats
from dlac_pipeline.supervise.ranks.rank_events import Event

_POLL_S = 0.05
_NOTICED_BY = "dlac chaos"
_OLD_LAUNCH_S = 30.0
"""Seconds for the ranks of a killed supervisor to end: they hold the lock of the run's folder no longer then."""

_ORPHANS_END_WITHIN_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """The newest heartbeats of a run."""

    folder: Path | None = None
    """Their launch folder."""
    step: int = 0
    """Last step that all ranks have finished."""
    furthest: int = 0
    """Last step that any rank has finished."""
    at: float = 0.0
    """Time of the newest one, in seconds since the epoch."""
    trains: bool = False
    """True if all ranks have finished a step in this attempt."""


class SupervisedNodes:
    """The nodes of one run. `close` them, however the run ends."""

    def __init__(self, job: ChaosJob, folder: Path) -> None:
        """`folder` is for the output of supervisors."""
        self.running: dict[int, NodeProcess] = {}
        """Nodes by number."""
        self.attempts = 0
        """Attempts that have begun."""
        self.total_steps: int | None = None
        """Last step of the run, once it is known."""
        self.is_finished = False
        """True once a node has reported the end of the run."""
        self._job, self._folder = job, folder
        self._id = f"chaos-{secrets.token_hex(4)}"
        self._attempt = self._started = 0
        self._orphans: list[psutil.Process] = []
        self._launches = Path(job.spec.checkpoint.local) / job.spec.run

    def start(self) -> None:
        """Start all nodes."""
        for number in range(self._job.spec.launch.max_nodes):
            self._start(number, Request(spec=self._job.spec_of(number), launched_by=self._id, repin=True))

    def tend(self, *, excused: bool, starts: bool = True) -> None:
        """Read the events of all nodes, and start those again that have ended, then sleep for a moment.

        `excused`: a fault may be the reason for an end. Otherwise, and if another launch would end in the same way, raises
        the error that ended the supervisor. Without `starts`, as during an outage, the ended ones wait.
        """
        for number, node in list(self.running.items()):
            has_ended = node.has_ended  # before its last events are read
            for event in node.read_events():
                self._note(event)
            if has_ended and starts:
                self._follow_end(number, node, excused=excused)
        time.sleep(_POLL_S)

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the living ranks of all nodes by number."""
        return {rank: process for node in self.running.values() for rank, process in node.ranks().items()}

    def launch_folders(self) -> frozenset[Path]:
        """Return the folders of all launches so far."""
        return frozenset(self._launches.glob("launch-*/"))

    def progress(self) -> RunProgress:
        """Return the progress by the newest heartbeats. Without any, as while the store is unavailable, step 0."""
        newest: list[tuple[float, Path]] = []
        for folder in self.launch_folders():
            with suppress(OSError):  # it is being removed
                newest.append((folder.stat().st_mtime, folder))
        found = []
        for _, folder in sorted(newest)[-2 * self._job.spec.launch.max_nodes :]:
            if heartbeats := read_heartbeats(folder):
                at, steps = max(each.at for each in heartbeats), [each.step for each in heartbeats]
                trains = all(each.spent.computing_us > 0 for each in heartbeats)
                found.append(RunProgress(folder=folder, step=min(steps), furthest=max(steps), at=at, trains=trains))
        return max(found, key=lambda each: each.at, default=RunProgress())

    def last_lines(self) -> str:
        """Return the last events and lines of each supervisor."""
        return "\n".join(node.last_lines() for node in self.running.values())

    def kill_supervisor(self, number: int) -> float:
        """SIGKILL the supervisor of a node, and return the time. The processes that it has started end by themselves."""
        supervisor = self.running[number].supervisor
        self._orphans += supervisor.children(recursive=True)
        return send_signal([supervisor], signal.SIGKILL)

    def close(self) -> None:
        """Kill all nodes, and the processes of killed supervisors that have not ended yet."""
        with signals_held():
            for node in self.running.values():
                node.close()
            send_signal(self._orphans, signal.SIGKILL)
            psutil.wait_procs(self._orphans, timeout=_ORPHANS_END_WITHIN_S)

    def _start(self, number: int, request: Request) -> None:
        self._started += 1
        folder = self._folder / f"supervisor-{self._started}"
        self.running[number] = NodeProcess(request, folder, self._job.environment)

    def _note(self, event: Event) -> None:
        if event["event"] == "attempt":
            self._attempt = max(self._attempt, event.get("attempt", 0))
            self.attempts += "leader" not in event
        elif event["event"] == "training":
            self.total_steps = event["total_steps"]

    def _follow_end(self, number: int, node: NodeProcess, *, excused: bool) -> None:
        """Start a supervisor again that has ended, unless it has finished the run."""
        node.close()
        last = node.last
        kind = str(last.get("kind", "")) if last.get("event") == "error" else ""
        if kind == RunFinished.__name__ or last.get("ending") in ("finished", "caught_up"):
            self.is_finished = True
        if self.is_finished:
            del self.running[number]
            return
        if last.get("ending") == "left":
            raise LeftUnfinished(f"the script ended at step {last['step']}, before the end of the run: fix it")
        if kind:
            known = error_class(kind)
            if not excused or known is None or not known.transient:
                raise error_from_kind(kind, str(last["message"]), default=TrainingFailed)
        elif not excused:
            raise TrainingFailed(
                f"expected the supervisor to run until a fault strikes it, found it ended with status {node.exit_code}: look "
                f"for its reason in its last lines\n{node.last_lines()}"
            )
        self._start(number, self._recovery(number))

    def _recovery(self, number: int) -> Request:
        """Return the request by which a node resumes the run. Without other nodes it replaces the attempt that ended."""
        spec = self._job.spec_of(number)
        request = Request(spec=spec, launched_by=self._id, noticed_by=_NOTICED_BY, noticed_at=time.time())
        if spec.launch.max_nodes > 1:
            return request
        update = {"replaces": self._attempt, "recovers": self._id, "takeover": True, "wait_s": _OLD_LAUNCH_S}
        return request.model_copy(update=update)
