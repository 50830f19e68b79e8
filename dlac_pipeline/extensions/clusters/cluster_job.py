"""A run as one job of a cluster: submit, follow, cancel it, and judge how it ended. See docs/design/0012-extensions.md."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dlac_pipeline.extensions.clusters.checks import check_lakehouse, store_in_doubt
from dlac_pipeline.extensions.clusters.kubernetes import Kubernetes
from dlac_pipeline.extensions.clusters.scheduler import JobState, Scheduler
from dlac_pipeline.extensions.clusters.slurm import Slurm
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, LedgerRow
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.launch_spec import LISTENS_S
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.supervisor import Outcome

Answer = TypeVar("Answer")
_LAST = ("ended", "error")
SILENT_S = 3600.0
"""Seconds until a scheduler that does not answer is given up: expired credentials are not renewed by waiting."""
GONE_S = 60.0
"""Seconds for which a scheduler must not know a job before the job counts as ended."""


@dataclass
class _Log:
    """A log: on Slurm all nodes write the same one, on Kubernetes each node writes another."""

    start: str | None = None
    nodes: int = 0
    last_events: list[Event] = field(default_factory=list)
    rest: str = ""
    """The beginning of a line whose end is not written yet."""


class NodeEvents:
    """The events of all nodes of a job."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._logs: dict[str, _Log] = {}
        self._last_at = 0.0

    def read(self, log: str, text: str) -> None:
        """Report the events in the next piece of a log."""
        place = self._logs.setdefault(log, _Log())
        *lines, place.rest = (place.rest + text).split("\n")
        for line in lines:
            for event in events_in(line):
                self._take(place, event)

    def _take(self, log: _Log, event: Event) -> None:
        if event["event"] == "node":
            if event["start"] != log.start:
                log.start, log.nodes, log.last_events = event["start"], 0, []
            log.nodes += 1
            return
        log.nodes = max(log.nodes, 1)
        if event["event"] in _LAST:
            log.last_events.append(event)
            self._last_at = time.monotonic()
        else:
            self._on_event(event)

    @property
    def last_events(self) -> list[Event]:
        """The ends of nodes."""
        return [event for log in self._logs.values() for event in log.last_events]

    @property
    def is_done(self) -> bool:
        """True if a node reported that the run needs no more training."""
        return any(event["event"] == "ended" and event["ending"] != "stopped" for event in self.last_events)

    @property
    def all_ended(self) -> bool:
        """True if each node that reported anything has also reported its end."""
        return all(len(log.last_events) >= log.nodes for log in self._logs.values())

    @property
    def quiet_s(self) -> float:
        """Seconds since a node reported its end."""
        return time.monotonic() - self._last_at


def events_in(line: str) -> Iterator[Event]:
    """Yield the events of a line, which may begin with a time stamp or hold several events without a line break."""
    decoder, at = json.JSONDecoder(), line.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(line, at)
        except ValueError:
            end = at + 1
        else:
            if isinstance(found, dict) and "event" in found:
                yield found
        at = line.find("{", end)


class ClusterJob:
    """A launcher: one job of one scheduler."""

    def __init__(
        self,
        request: Request,
        scheduler: Scheduler,
        on_event: Callable[[Event], None] = lambda event: None,
        *,
        look_s: float = 5.0,
        silent_s: float = SILENT_S,
        gone_s: float = GONE_S,
    ) -> None:
        """`look_s` is the time between two requests to the scheduler. The other two replace the constants above."""
        self._request = request
        self._scheduler = scheduler
        self._on_event = on_event
        self._look_s = look_s
        self._silent_s = silent_s
        self._gone_s = gone_s
        self._stop = threading.Event()
        self._events = NodeEvents(self._report)
        self._leave_s = request.spec.launch.deadline_s + LISTENS_S
        self._cancel_again_at = 0.0
        self._ending_since: float | None = None
        self._over_since: float | None = None
        self._silent_since: float | None = None
        self._unknown_since: tuple[float, int | None] | None = None
        """Time since which the scheduler knows no such job, and the position of the ledger then."""

    def stop(self) -> None:
        """Cancel the job: its nodes leave after a checkpoint."""
        self._stop.set()

    leave = stop
    """A job that no process follows would end unseen."""

    def check(self) -> None:
        """Raise `SpecInvalid` if the scheduler cannot run the job that the spec requests, `BadInput` without its client."""
        self._check_settings()
        self._scheduler.check_client()

    def _check_settings(self) -> None:
        check_lakehouse(self._request.spec)
        self._scheduler.check(self._request.spec)

    def render(self) -> str:
        """Return the job as its scheduler would get it. Nothing is submitted, and no cluster is asked. Raises as `check`."""
        self._check_settings()
        return self._scheduler.render(self._request).strip()

    def run(self) -> Outcome:
        """Submit the job and follow it to its end.

        Raises:
            ClusterRefused: the scheduler does not take it.
            ClusterSilent: the scheduler stopped answering. The job is left as it is.
            TrainingFailed: the job ended before the run, and no node reported why.
            DlacError: the error that its nodes reported.
        """
        if doubt := store_in_doubt(self._request.spec):
            self._warn(doubt)
        job = self.submit()
        self._report({"event": "submitted", "job": job})
        state = self._follow(job)
        self._read_logs(job)
        return self._judge(job, state)

    def submit(self) -> str:
        """Submit the job, near the nodes with the newest checkpoint, and return its name at the scheduler."""
        run = self._request.spec.run
        near = self._query(lambda ledger: nodes_with_newest(ledger.rows(run, kinds=HEAD_KINDS)))
        try:
            return self._scheduler.submit(self._request, near or [])
        except Exception as err:  # whatever Slurm's commands or the client of Kubernetes raise
            raise errors.ClusterRefused(
                f"expected {self._scheduler.name} to take the job of run {run!r}, found {type(err).__name__}: {err}; "
                "`dlac train --render` shows the job"
            ) from err

    def _follow(self, job: str) -> str:
        """Poll the job until it has ended, and return its last state. A job that is queued again has not ended."""
        state, shown = JobState(name=""), ""
        while not self._has_ended(state):
            failed: Exception | None = None
            try:
                state = self._look(job, state)
            except Exception as err:  # whatever Slurm's commands or the client of Kubernetes raise
                failed = err
            try:
                self._act(job, state)
            except Exception as err:
                failed = failed or err
            if state.name != shown:
                shown = state.name
                self._report({"event": "job", "job": job, "state": shown})
            if failed is None:
                self._silent_since = None
            elif self._is_given_up(job, failed):
                break
            self._read_logs(job)
            if self._ending_since is not None:
                time.sleep(min(self._look_s, 1.0))  # Kubernetes drops the log with the pod
            else:
                self._stop.wait(self._look_s)
        return state.name

    def _look(self, job: str, last: JobState) -> JobState:
        """Return the job's state. A job that the scheduler does not know counts as ended, but not while the run commits."""
        state = self._scheduler.state(job)
        if state is not None:
            self._unknown_since = None
            return state
        now, position = time.monotonic(), self._query(lambda ledger: ledger.state(self._request.spec.run).fence.seq)
        if self._unknown_since is None and self._ending_since is None:
            self._warn(f"expected {self._scheduler.name} to know job {job}, found no such job: it is asked again")
        if self._unknown_since is None or self._unknown_since[1] != position:
            self._unknown_since = (now, position)
        gone = self._ending_since is not None or now - self._unknown_since[0] >= self._gone_s
        return replace(last, over=gone or self._events.is_done)

    def _act(self, job: str, state: JobState) -> None:
        """Cancel a job that is to end, again where that changed nothing. Queue one again that has lost its first node."""
        if state.over or self._unknown_since is not None:
            return
        stays_s = LISTENS_S if self._events.all_ended else self._silent_s
        part_stays = self._events.is_done and self._events.quiet_s > stays_s
        if self._stop.is_set() or part_stays or (state.first_node_lost and self._is_finished()):
            self._cancel(job)
        elif state.first_node_lost:
            self._warn(f"job {job} has lost its first node, on which its batch script ran: it is queued again")
            try:
                self._scheduler.requeue(job)
            except ConnectionError as err:
                self._warn(f"expected {self._scheduler.name} to queue job {job} again, found {err}: it is cancelled")
                self._cancel(job)

    def _cancel(self, job: str) -> None:
        now = time.monotonic()
        self._ending_since = self._ending_since or now
        if now >= self._cancel_again_at:
            self._scheduler.cancel(job)
            self._cancel_again_at = now + self._leave_s

    def _has_ended(self, state: JobState) -> bool:
        """Return True if the job is over and its logs are read. A state that lasts for one poll may lead back to the queue."""
        if self._ending_since is not None and self._events.is_done:
            return True
        if not state.over:
            self._over_since = None
            return False
        now = time.monotonic()
        self._over_since = self._over_since or now
        read = bool(self._events.last_events) and self._events.quiet_s > self._look_s
        return now - self._over_since >= self._look_s * (1 if read else 2)

    def _is_given_up(self, job: str, err: Exception) -> bool:
        """Note a request without an answer. Return True if the run's end is known, or raise `ClusterSilent` in the end."""
        now, found = time.monotonic(), f"found {type(err).__name__}: {err}"
        expected = f"expected {self._scheduler.name} to answer about job {job}"
        if self._silent_since is None:
            self._silent_since = now
            self._warn(f"{expected}, {found}; it is asked again")
        bears_s = self._silent_s if self._ending_since is None else min(self._silent_s, self._leave_s)
        if self._ending_since is not None and self._events.last_events:
            return self._events.quiet_s > self._look_s
        if now - max(self._silent_since, self._ending_since or 0.0) <= bears_s:
            return False
        if self._events.is_done or self._is_finished():
            return True
        raise errors.ClusterSilent(
            f"{expected}, {found}, for {bears_s:.0f} s; the job is left as it is, and may still train: look with `dlac status "
            f"{self._request.spec.run} --watch`, and cancel it with {self._scheduler.name}'s own commands"
        ) from err

    def _read_logs(self, job: str) -> None:
        pieces: list[tuple[str, str]] = []
        with suppress(Exception):  # no log yet, or none any more
            pieces = self._scheduler.read(job)
        for log, piece in pieces:
            self._events.read(log, piece)

    def _warn(self, message: str) -> None:
        self._report({"event": "warning", "message": message})

    def _report(self, event: Event) -> None:
        self._on_event({"run": self._request.spec.run, **event})

    def _judge(self, job: str, state: str) -> Outcome:
        """Return how the run ended. One node's report that it is done outweighs reports of nodes that were lost or left."""
        ended = [event for event in self._events.last_events if event["event"] == "ended"]
        done = [event for event in ended if event["ending"] != "stopped"]
        failed = [event for event in self._events.last_events if event["event"] == "error"]
        if not done and self._is_finished():
            return Outcome(ending="finished", attempts=0, step=self._head_step() or 0)
        if not done and failed:
            raise errors.error_from_kind(failed[-1]["kind"], failed[-1]["message"], default=errors.TrainingFailed)
        if not done and state == "PREEMPTED" and not self._stop.is_set():
            raise errors.TrainingFailed(
                f"expected {self._scheduler.name} to queue job {job} again after its preemption, found it ended at step "
                f"{self._head_step()}: start the run again, `dlac train` resumes it"
            )
        if ended:
            last = max(done or ended, key=lambda event: int(event["step"]))
            return Outcome(ending=last["ending"], attempts=last["attempts"], step=last["step"])
        if self._stop.is_set() and (step := self._head_step()) is not None:
            return Outcome(ending="stopped", attempts=0, step=step)
        raise errors.TrainingFailed(
            f"expected job {job} to report how it ended, found {state or 'nothing'} in {self._scheduler.name}: read its "
            "logs there"
        )

    def _is_finished(self) -> bool:
        return bool(self._query(lambda ledger: ledger.state(self._request.spec.run).finished))

    def _head_step(self) -> int | None:
        """Step of the last checkpoint, or 0 before the first. None: the ledger cannot be asked."""

        def step_of(ledger: Ledger) -> int:
            with suppress(errors.NoSuchCheckpoint, errors.NoSuchRun):
                return int(ledger.restorable(self._request.spec.run).step)
            return 0

        return self._query(step_of)

    def _query(self, question: Callable[[Ledger], Answer]) -> Answer | None:
        with suppress(errors.DlacError):
            return question(Ledger(connect(self._request.spec.lakehouse)))
        return None


def slurm_job(request: Request, on_event: Callable[[Event], None]) -> ClusterJob:
    """Return the launcher for `launch.on = "slurm"`."""
    return ClusterJob(request, Slurm(), on_event)


def kubernetes_job(request: Request, on_event: Callable[[Event], None]) -> ClusterJob:
    """Return the launcher for `launch.on = "kubernetes"`."""
    return ClusterJob(request, Kubernetes(request), on_event)


def nodes_with_newest(rows: Sequence[LedgerRow]) -> list[str]:
    """Return the nodes with a copy of the head of a run, by the run's rows. Empty: none, or none is known."""
    checkpoints = checkpoint_rows(rows)
    head = checkpoints.get(fence_of_rows(rows).head or "")
    same_attempt = (row for row in checkpoints.values() if head is not None and row.attempt == head.attempt)
    return next((list(row.nodes) for row in same_attempt if row.nodes), [])
