"""A run as a job of a cluster: submitted through TorchX, followed by what its nodes say, asked to stop, and in the end judged.

The nodes recover by themselves (`launchers/node.py`); nothing here starts anything twice. What nodes say comes out of the
scheduler's logs, which may lag or be lost: where no node's last word was heard, the ledger says whether the run is finished.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from catalog import errors
from catalog.connect import connect
from catalog.errors import ClusterRefused, ClusterSilent, DlacError, NoSuchCheckpoint, NoSuchRun, TrainingFailed
from catalog.ledger import Ledger
from dlac_pipeline.launch_spec import LISTENS_S
from dlac_pipeline.launchers.hearing import Logs
from dlac_pipeline.launchers.schedulers import ROLE, Scheduler
from dlac_pipeline.recover.attempt import Event
from dlac_pipeline.recover.supervise import Outcome
from dlac_pipeline.request import Request

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.schedulers.api import Scheduler as Backend
    from torchx.specs import AppDryRunInfo

Answer = TypeVar("Answer")
_ANSWERS_WITHIN_S = 60.0
SILENT_S = 3600.0
"""A scheduler that does not answer for so long is given up: credentials that have expired do not come back by themselves."""
GONE_S = 60.0
"""So long a scheduler must know nothing of a job: Slurm's commands fail for a while when its controller starts again."""


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
        """A job of a request.

        Args:
            request: What is trained.
            scheduler: Who is asked.
            on_event: Told of everything.
            look_s: Seconds between two questions to the scheduler.
            silent_s: Seconds for which it may leave them unanswered.
            gone_s: Seconds for which it must know nothing of the job before that is taken for its end.
        """
        self._request = request
        self._scheduler = scheduler
        self._on_event = on_event
        self._look_s = look_s
        self._silent_s = silent_s
        self._gone_s = gone_s
        self._stop = threading.Event()
        self._gone = threading.Event()
        self._saying = threading.Lock()
        self._logs = Logs(scheduler.nodes, self._tell)
        self._ask_at = 0.0
        self._cancelled_at: float | None = None
        self._over_at: float | None = None
        self._missing: tuple[float, int | None] | None = None
        """Since when the scheduler knows nothing of the job, and how far the ledger went then."""
        self._ran = False

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
        for doubt in self._scheduler.doubts(self._request.spec):
            self._warn(doubt)
        with _runner() as runner:
            handle = self._submitted(runner)
            self._tell({"event": "submitted", "job": handle})
            listeners = [
                threading.Thread(target=self._listen, args=(_backend(runner, handle), handle, node), daemon=True)
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
            info = self._rendered(runner, render=False)
            self._scheduler.overhear(info.request)
            return str(runner.schedule(info))
        except Exception as err:  # whatever TorchX, Slurm's commands or the client of Kubernetes raise
            raise ClusterRefused(
                f"expected {self._scheduler.name} to take the job of run {self._request.spec.run!r}, found "
                f"{self._scheduler.reason(err) or f'{type(err).__name__}: {err}'}; `dlac train --render` shows the job"
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
        state, seen, over, silence = "", "", False, _Silence()
        while True:
            failed: Exception | None = None
            try:
                seen, over = self._looked(runner, handle, state)
            except Exception as err:  # whatever TorchX, Slurm's commands or the client of Kubernetes raise
                failed = err
            try:
                if self._is_to_end() and not over:
                    self._cancel(runner, handle, unanswered=failed is not None)
            except Exception as err:
                failed = failed or err
            if seen != state:
                state = seen
                self._tell({"event": "job", "job": handle, "state": state})
            if failed is None:
                silence.broken()
            elif self._is_given_up(silence, handle, failed):
                return state
            if self._is_heard_out(state, over=over):
                return state
            if self._stop.is_set():
                time.sleep(self._look_s)
            else:
                self._stop.wait(self._look_s)

    def _looked(self, runner: Runner, handle: str, state: str) -> tuple[str, bool]:
        """The state of the job, and whether it is over."""
        status = _answered(runner.status, handle)
        if status is not None:
            self._missing = None
            self._ran = self._ran or status.state.name == "RUNNING"
            return status.state.name, status.is_terminal()
        if not _answered(self._scheduler.forgot, _id_of(handle)):
            self._missing = None
            return state, False
        return state, self._is_gone(handle)

    def _is_gone(self, handle: str) -> bool:
        """Whether a job of which the scheduler knows nothing has ended: not while it commits, and not at the first look."""
        if self._logs.done or (self._cancelled_at and self._logs.last_words):
            return True
        now = time.monotonic()
        if self._missing is None:
            self._missing = (now, self._appends())
            self._warn(f"expected {self._scheduler.name} to know job {handle}, found nothing; it is asked again")
            return False
        since, appends = self._missing
        if now - since < self._gone_s:
            return False
        if (appends_now := self._appends()) != appends:
            self._missing = (now, appends_now)
            return False
        return True

    def _is_to_end(self) -> bool:
        """Whether the job is to be cancelled: somebody asked for it, or the run is done and something of the job stays behind."""
        if self._stop.is_set():
            return True
        stays_s = LISTENS_S if self._logs.all_ended else self._silent_s
        return self._logs.done and self._logs.quiet_s > stays_s

    def _cancel(self, runner: Runner, handle: str, *, unanswered: bool) -> None:
        """Cancel the job, and again where that changes nothing. TorchX looks at it first: not where looking fails."""
        if self._missing is not None or time.monotonic() < self._ask_at:
            return
        if unanswered:
            _answered(_backend(runner, handle)._cancel_existing, _id_of(handle))  # what `cancel` does after a look
        else:
            _answered(runner.cancel, handle)
        now = time.monotonic()
        self._ask_at = now + self._leaves_s
        self._cancelled_at = self._cancelled_at or now

    def _is_heard_out(self, state: str, *, over: bool) -> bool:
        """Whether there is nothing to wait for: schedulers call a job cancelled whose nodes have yet to checkpoint."""
        if self._cancelled_at and self._logs.done:
            return True
        if not over:
            self._over_at = None
            return False
        if not (self._ran or self._logs.heard) or not (self._cancelled_at or state == "CANCELLED"):
            return True
        self._over_at = self._over_at or time.monotonic()
        if self._logs.last_words:
            return self._logs.quiet_s > self._look_s
        return time.monotonic() > (self._cancelled_at or self._over_at) + self._leaves_s

    @property
    def _leaves_s(self) -> float:
        return self._request.spec.launch.leave_s + LISTENS_S

    def _is_given_up(self, silence: _Silence, handle: str, err: Exception) -> bool:
        """Bear a look that failed; whether to follow no longer, since it is known how the run ended.

        Raises:
            ClusterSilent: for too long.
        """
        ending = self._is_to_end()
        bears_s = min(self._silent_s, self._leaves_s) if ending else self._silent_s
        found = f"expected {self._scheduler.name} to answer about job {handle}, found {type(err).__name__}: {err}"
        if silence.goes_on(stopping=ending):
            self._warn(f"{found}; it is asked again")
        elif self._cancelled_at and self._logs.last_words:
            return self._logs.quiet_s > self._look_s
        elif silence.lasts_s > bears_s:
            if self._logs.done or self._is_finished():
                return True
            raise ClusterSilent(
                f"{found}, for {bears_s:.0f} s; the job is left as it is, and may train on: look with `dlac status "
                f"{self._request.spec.run} --watch`, and cancel it with {self._scheduler.name}'s own commands"
            ) from err
        return False

    def _listen(self, backend: Backend[Any], handle: str, node: int) -> None:
        """Pass on what a node says, as long as the job is there, and what is left of it then."""
        last = False
        while not last:
            last = self._gone.wait(self._look_s)
            with suppress(Exception):  # no log yet, or none any more
                # not asked through the runner, which has no logs of a job that Slurm has forgotten
                tail = self._scheduler.tails and not last
                lines = backend.log_iter(_id_of(handle), ROLE, node, should_tail=tail, streams=self._scheduler.stream)
                self._logs.each[node].read(lines, last=last)

    def _warn(self, message: str) -> None:
        self._tell({"event": "warning", "message": message})

    def _tell(self, event: Event) -> None:
        with self._saying:
            self._on_event({"run": self._request.spec.run, **event})

    def _judged(self, handle: str, state: str) -> Outcome:
        """How the run ended. One node's word that it is done outweighs those that were lost or left before."""
        said = self._logs.last_words
        ended = [words for words in said if words["event"] == "ended"]
        done = [words for words in ended if words["ending"] != "stopped"]
        failed = [words for words in said if words["event"] == "error"]
        if not done and not failed and self._is_finished():
            return Outcome(ending="finished", attempts=0, step=self._head_step() or 0)
        if done or (ended and not failed):
            words = max(done or ended, key=lambda words: int(words["step"]))
            return Outcome(ending=words["ending"], attempts=words["attempts"], step=words["step"])
        if failed:
            raise errors.revived(failed[-1]["kind"], failed[-1]["message"], default=TrainingFailed)
        if self._stop.is_set() and (step := self._head_step()) is not None:
            return Outcome(ending="stopped", attempts=0, step=step)
        raise TrainingFailed(
            f"expected job {handle} to say how it ended, found {state or 'nothing'} in {self._scheduler.name}: read its "
            "logs there"
        )

    def _is_finished(self) -> bool:
        with suppress(DlacError):
            return self._ledger().state(self._request.spec.run).finished
        return False

    def _head_step(self) -> int | None:
        """Step of the last checkpoint; 0 before the first. None: the ledger cannot be asked."""
        with suppress(DlacError):
            try:
                return int(self._ledger().restorable(self._request.spec.run)["step"])
            except (NoSuchCheckpoint, NoSuchRun):
                return 0
        return None

    def _appends(self) -> int | None:
        """How far the run's rows go; None: the ledger cannot be asked."""
        with suppress(DlacError):
            return self._ledger().state(self._request.spec.run).fence.seq
        return None

    def _ledger(self) -> Ledger:
        return Ledger(connect(self._request.spec.lakehouse))


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


def _backend(runner: Runner, handle: str) -> Backend[Any]:
    """TorchX's client of the scheduler that has a job."""
    from torchx.specs import parse_app_handle

    return runner._scheduler(parse_app_handle(handle).scheduler_backend)  # shown nowhere else


def _id_of(handle: str) -> str:
    from torchx.specs import parse_app_handle

    return str(parse_app_handle(handle).app_id)
