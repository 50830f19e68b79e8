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
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from catalog import errors
from catalog.connect import connect
from catalog.errors import ClusterRefused, ClusterSilent, DlacError, TrainingFailed
from catalog.ledger import Ledger
from dlac_pipeline.launchers.schedulers import ROLE, Scheduler
from dlac_pipeline.recover.attempt import Event
from dlac_pipeline.recover.supervise import Outcome
from dlac_pipeline.request import Request

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDryRunInfo

Answer = TypeVar("Answer")
_LAST_WORDS = ("ended", "error")
_MARGIN_S = 30.0
"""What a job gets on top of its ranks' time to leave, before it is asked again."""
_ANSWERS_WITHIN_S = 60.0
SILENT_S = 3600.0
"""A scheduler that does not answer for so long is given up: credentials that have expired do not come back by themselves."""


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
    ) -> None:
        """`look_s`: seconds between two questions to the scheduler; `silent_s`: for which it may leave them unanswered."""
        self._request = request
        self._scheduler = scheduler
        self._on_event = on_event
        self._look_s = look_s
        self._silent_s = silent_s
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
            ClusterSilent: the scheduler does not answer any more; the job is left as it is.
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
            try:
                state = self._followed(runner, handle)
            finally:
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
        """Look until the job has ended; its last state. A scheduler that does not answer has not ended it.

        Raises:
            ClusterSilent: it does not answer any more, and nothing says that the run is finished.
        """
        state, seen, over, ask_at = "", "", False, 0.0
        silence = _Silence()
        while True:
            try:
                status = _answered(runner.status, handle)
                over = status is None or status.is_terminal()  # Slurm forgets jobs that have ended
                seen = state if status is None else status.state.name
                if self._stop.is_set() and not over and time.monotonic() > ask_at:
                    _answered(runner.cancel, handle)
                    ask_at = time.monotonic() + self._request.spec.launch.leave_s + _MARGIN_S
                silence.broken()
            except Exception as err:  # whatever TorchX, Slurm's commands or the client of Kubernetes raise
                if silence.goes_on(stopping=self._stop.is_set()):
                    self._tell({"event": "warning", "message": f"{self._unanswered(handle, err)}; it is asked again"})
                elif silence.lasts_s > self._bears_s():
                    if self._is_finished():
                        return state
                    raise ClusterSilent(self._given_up(handle, err)) from err
            if seen != state:
                state = seen
                self._tell({"event": "job", "job": handle, "state": state})
            if over:
                return state
            if self._stop.is_set():
                time.sleep(self._look_s)
            else:
                self._stop.wait(self._look_s)

    def _bears_s(self) -> float:
        """Seconds of silence that are borne; who is told to stop is not waited for so long."""
        leaves_s = self._request.spec.launch.leave_s + _MARGIN_S
        return min(self._silent_s, leaves_s) if self._stop.is_set() else self._silent_s

    def _unanswered(self, handle: str, err: Exception) -> str:
        return f"expected {self._scheduler.name} to answer about job {handle}, found {type(err).__name__}: {err}"

    def _given_up(self, handle: str, err: Exception) -> str:
        return (
            f"{self._unanswered(handle, err)}, for {self._bears_s():.0f} s; the job is left as it is, and may train on: look "
            f"with `dlac status {self._request.spec.run} --watch`, and cancel it with {self._scheduler.name}'s own commands"
        )

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
            raise errors.revived(failed[-1]["kind"], failed[-1]["message"], default=TrainingFailed)
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


class _Silence:
    """Of a scheduler: since when it has not answered."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._stopping = False
        self.lasts_s = 0.0
        """Since the first question without an answer; or since it was to be told to stop, if that came later."""

    def broken(self) -> None:
        """It has answered."""
        self._since = None

    def goes_on(self, *, stopping: bool) -> bool:
        """Note a question without an answer; whether it is the first."""
        now, first = time.monotonic(), self._since is None
        if self._since is None or stopping != self._stopping:
            self._since, self._stopping = now, stopping
        self.lasts_s = now - self._since
        return first


def _answered(question: Callable[[str], Answer], handle: str) -> Answer:
    """What a scheduler answers. Where the network has gone silent its client may wait for ever: on a thread of its own."""
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(question(handle))
        except Exception as err:
            answer.set_exception(err)

    threading.Thread(target=ask, daemon=True).start()
    if not wait([answer], _ANSWERS_WITHIN_S).done:
        raise TimeoutError(f"no answer within {_ANSWERS_WITHIN_S:.0f} s")
    return answer.result()


def _runner() -> Runner:
    from torchx.runner import get_runner

    return get_runner()
