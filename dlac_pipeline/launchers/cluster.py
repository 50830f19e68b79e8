"""A run as a job of a cluster: submitted through TorchX, followed by what its nodes say, asked to stop, and in the end judged.

The nodes recover by themselves (`launchers/node.py`); nothing here starts anything twice. What nodes say comes out of the
scheduler's logs, which may lag or be lost: where no node's last word was heard, the ledger says whether the run is finished.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from catalog import errors
from catalog.connect import connect
from catalog.errors import ClusterRefused, DlacError, TrainingFailed
from catalog.ledger import Ledger
from dlac_pipeline.launchers.schedulers import ROLE, Scheduler
from dlac_pipeline.recover.attempt import Event
from dlac_pipeline.recover.supervise import Outcome
from dlac_pipeline.request import Request

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDryRunInfo

_LAST_WORDS = ("ended", "error")
_MARGIN_S = 30.0
"""What a job gets on top of its ranks' time to leave, before it is asked again."""


class ClusterJob:
    """A launcher: one job of one scheduler."""

    def __init__(
        self,
        request: Request,
        scheduler: Scheduler,
        on_event: Callable[[Event], None] = lambda event: None,
        *,
        look_s: float = 5.0,
    ) -> None:
        """`look_s`: seconds between two questions to the scheduler."""
        self._request = request
        self._scheduler = scheduler
        self._on_event = on_event
        self._look_s = look_s
        self._stop = threading.Event()
        self._gone = threading.Event()
        self._saying = threading.Lock()
        self._last_words: list[Event] = []

    def stop(self) -> None:
        """Cancel the job: its nodes are told to leave, behind a checkpoint."""
        self._stop.set()

    leave = stop
    """A job that nobody follows would end unseen."""

    def render(self) -> str:
        """The job as its scheduler would get it; nothing is submitted, nor any cluster asked."""
        with _runner() as runner:
            return str(self._rendered(runner, render=True)).strip()

    def run(self) -> Outcome:
        """Submit the job and follow it to its end.

        Raises:
            ClusterRefused: the scheduler does not take it.
            TrainingFailed: it ended, and nobody said why.
            DlacError: what its nodes said.
        """
        with _runner() as runner:
            handle = self._submitted(runner)
            self._tell({"event": "submitted", "job": handle})
            listeners = [
                threading.Thread(target=self._listen, args=(runner, handle, node), daemon=True)
                for node in range(self._scheduler.nodes)
            ]
            for listener in listeners:
                listener.start()
            state = self._followed(runner, handle)
            self._gone.set()
            for listener in listeners:
                listener.join(2 * self._look_s)
        return self._judged(handle, state)

    def _submitted(self, runner: Runner) -> str:
        try:
            return str(runner.schedule(self._rendered(runner, render=False)))
        except Exception as err:  # whatever TorchX, Slurm's commands or the client of Kubernetes raise
            raise ClusterRefused(
                f"expected {self._scheduler.name} to take the job of run {self._request.spec.run!r}, found "
                f"{type(err).__name__}: {err}; `dlac train --render` shows the job"
            ) from err

    def _rendered(self, runner: Runner, *, render: bool) -> AppDryRunInfo[Any]:
        scheduler, request = self._scheduler, self._request
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a machine outside the cluster, and of retries: docs/launchers.md
            info = runner.dryrun(scheduler.app(request), scheduler.name, scheduler.options(request, render=render))
        scheduler.amend(info.request, request)
        return info

    def _followed(self, runner: Runner, handle: str) -> str:
        """Look until the job has ended; its last state."""
        state, ask_at = "", 0.0
        while True:
            with suppress(Exception):  # a scheduler that does not answer has not ended the job
                status = runner.status(handle)
                if status is None:  # Slurm forgets jobs that have ended
                    return state
                if status.state.name != state:
                    state = status.state.name
                    self._tell({"event": "job", "job": handle, "state": state})
                if status.is_terminal():
                    return state
                if self._stop.is_set() and time.monotonic() > ask_at:
                    ask_at = time.monotonic() + self._request.spec.launch.leave_s + _MARGIN_S
                    runner.cancel(handle)
            if self._stop.is_set():
                time.sleep(self._look_s)
            else:
                self._stop.wait(self._look_s)

    def _listen(self, runner: Runner, handle: str, node: int) -> None:
        """Pass on what a node says, as long as the job is there, and what is left of it then."""
        heard = 0
        last = False
        while not last:
            last = self._gone.wait(self._look_s)
            with suppress(Exception):  # no log yet, or none any more
                lines = runner.log_lines(
                    handle, ROLE, node, should_tail=self._scheduler.tails and not last, streams=self._scheduler.stream
                )
                for number, line in enumerate(lines):
                    if number >= heard:
                        heard = number + 1
                        self._hear(line)

    def _hear(self, line: str) -> None:
        """Pass on an event; other lines are not for programs."""
        try:
            event = json.loads(line[line.index("{") :])  # behind a time stamp
        except ValueError:
            return
        if not isinstance(event, dict) or "event" not in event:
            return
        if event["event"] in _LAST_WORDS:
            self._last_words.append(event)
        else:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        with self._saying:
            self._on_event({"run": self._request.spec.run, **event})

    def _judged(self, handle: str, state: str) -> Outcome:
        """How the run ended. One node's word that it is done outweighs those that were lost or left before."""
        ended = [words for words in self._last_words if words["event"] == "ended"]
        done = [words for words in ended if words["ending"] != "stopped"]
        failed = [words for words in self._last_words if words["event"] == "error"]
        if not done and not failed and self._is_finished():
            return Outcome(ending="finished", attempts=0, step=0)
        if done or (ended and not failed):
            words = max(done or ended, key=lambda words: int(words["step"]))
            return Outcome(ending=words["ending"], attempts=words["attempts"], step=words["step"])
        if failed:
            kind = getattr(errors, failed[-1]["kind"], TrainingFailed)
            raise kind(failed[-1]["message"])
        if self._stop.is_set():
            return Outcome(ending="stopped", attempts=0, step=0)
        raise TrainingFailed(
            f"expected job {handle} to say how it ended, found {state or 'nothing'} in {self._scheduler.name}: read its "
            "logs there"
        )

    def _is_finished(self) -> bool:
        with suppress(DlacError):
            return Ledger(connect(self._request.spec.lakehouse)).state(self._request.spec.run).finished
        return False


def _runner() -> Runner:
    from torchx.runner import get_runner

    return get_runner()
