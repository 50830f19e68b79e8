"""Settings of listeners, their queues, and the translation of events."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.listeners import events
from dlac_pipeline.extensions.listeners.main import Subscription
from dlac_pipeline.extensions.listeners.settings import ListenersSpec
from dlac_pipeline.extensions.listeners.translate import EventTranslator
from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, Spent
from tests.unit.test_spec import GOOD

pytestmark = pytest.mark.usefixtures("only_this_process")

ENDED = events.AttemptEnded(run="r", attempt=1, at=0.0, ending="finished", reason="", step=9)
CLAIMED = {
    **{"event": "claimed", "at": 1.0, "attempt": 1, "step": 0, "head_step": 0, "resumed_from": None, "branch": 1},
    **{"went_back": [], "tables": [{"name": "src.t", "table": "src.t", "snapshot_id": 5, "rows": 100}]},
    **{"world_size": 2, "nodes": 1, "ledger": "u"},
}


def spec_with(**listeners: Any) -> JobSpec:
    """Return a job spec with listeners."""
    return parse_spec({**GOOD, "listeners": listeners}, origin="the test")


def progress(step: int) -> events.ProgressMade:
    """Return the progress event of a step."""
    numbers: dict[str, Any] = {"loss_step": step, "loss": 0.5, "rows": 1, "rows_at_risk": 1, "rows_per_s": 1.0}
    return events.ProgressMade(run="r", attempt=1, at=0.0, step=step, tokens_per_s=None, **numbers)


class Gate:
    """A listener that waits before its first event, and keeps all of them."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.received: list[events.RunEvent] = []

    def on_event(self, event: events.RunEvent) -> None:
        """Keep an event."""
        self.reached.set()
        self.opened.wait()
        self.received.append(event)


@pytest.mark.parametrize(
    ("listeners", "message"),
    [
        ({"mlflow": {"password": "hunter2"}}, r"listeners\.mlflow\.password: unknown field.*found str"),
        ({"mlflow": {"experiment": "https://me:hunter2@host"}}, r"no secret, found one in mlflow\.experiment"),
        ({"mine": {"api_key": "hunter2"}}, r"no secret, found one in mine\.api_key: .*environment variable"),
    ],
)
def test_wrong_settings_are_refused_by_name(listeners: dict[str, Any], message: str) -> None:
    """The message names the setting, and never a secret."""
    with pytest.raises(SpecInvalid, match=message) as caught:
        spec_with(**listeners)
    assert "hunter2" not in str(caught.value)


def test_short_table_names_other_listener() -> None:
    """[listeners.mine] has the options of another distribution's listener, also after a copy of the spec was read again."""
    again = parse_spec(spec_with(mine={"path": "x"}, prometheus={}).model_dump(mode="json"), origin="a copy")
    prometheus = {"host": "127.0.0.1", "port": 9464}
    assert again.section(ListenersSpec).chosen() == {"prometheus": prometheus, "mine": {"path": "x"}}


def test_unknown_listener_is_refused() -> None:
    """The message has the name that is meant."""
    with pytest.raises(BadInput, match=r"listener in \[listeners\.mlfow\], found 'mlfow': did you mean 'mlflow'\?"):
        spec_with(mlfow={}).section(ListenersSpec).check_here()


def test_oldest_progress_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A full queue keeps life-cycle events and the newest progress, and the number of dropped events is logged."""
    gate = Gate()
    subscription = Subscription("gate", lambda: gate, most_waiting=3)
    subscription.put(ENDED)  # the listener waits with it in hand
    assert gate.reached.wait(60)
    for event in (progress(1), ENDED, progress(2), progress(3), progress(4), ENDED, ENDED, ENDED):
        subscription.put(event)
    gate.opened.set()
    subscription.put(None)
    subscription.join(time.monotonic() + 10)
    assert gate.received == [ENDED, ENDED, progress(3), progress(4), ENDED, ENDED, ENDED]
    assert "'gate' ended: 0 errors, 2 progress events dropped, 0 events left" in caplog.text


def test_errors_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first error has its traceback, the end has the count, and later events arrive."""

    class Fails(Gate):
        def on_event(self, event: events.RunEvent) -> None:
            self.received.append(event)
            raise RuntimeError("full")

    fails = Fails()
    subscription = Subscription("fails", lambda: fails, most_waiting=9)
    for _ in range(3):
        subscription.put(ENDED)
    subscription.put(None)
    subscription.join(time.monotonic() + 10)
    assert (len(fails.received), caplog.text.count("RuntimeError: full")) == (3, 1)
    assert "'fails' ended: 3 errors, 0 progress events dropped" in caplog.text


def test_failed_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A listener that cannot be made receives nothing, and blocks nothing."""

    def make() -> events.Listener:
        raise OSError("port 9464 is in use")

    subscription = Subscription("broken", make, most_waiting=9)
    subscription.put(ENDED)
    subscription.put(None)
    subscription.join(time.monotonic() + 10)
    assert "'broken' did not start, and receives no events" in caplog.text


def test_rows_at_risk_follow_commits(tmp_path: Path) -> None:
    """The rows of the heartbeats count, without the rows of committed checkpoints, over all ranks."""
    translator = EventTranslator(spec_with(), parent_run="")
    (started,) = translator.translate({**CLAIMED, "folder": str(tmp_path)})
    assert isinstance(started, events.AttemptStarted)
    files = [HeartbeatFile(tmp_path, rank) for rank in range(2)]

    def beat(step: int) -> list[events.RunEvent]:
        for file in files:
            spent = Spent(rows=16 * step, began=time.time() - 1)
            file.write(step, Phase.TRAINING, loss_step=step, loss=0.25, spent=spent)
        return translator.poll()

    (first,) = beat(2)
    assert isinstance(first, events.ProgressMade)
    assert (first.step, first.rows, first.rows_at_risk, first.loss) == (2, 64, 64, 0.25)
    assert translator.poll() == []
    commit = {"event": "checkpoint", "at": 2.0, "rows": 64, "rows_by_source": [64], "step": 2, "checkpoint_id": "c"}
    facts = {"location": "file:///c", "ledger_snapshot_id": 7, "bytes": 1, "duration_s": 0.1, "losses": [1.0, 0.25]}
    (committed,) = translator.translate({**commit, **facts})
    assert isinstance(committed, events.CheckpointCommitted)
    assert (committed.rows_by_table, committed.losses) == ({"src.t": 64}, (1.0, 0.25))
    assert committed.rows_at_risk == 0
    (second,) = beat(3)
    assert isinstance(second, events.ProgressMade)
    assert (second.rows, second.rows_at_risk) == (96, 32)
    for file in files:
        file.close()


def test_memory_state_is_at_risk(tmp_path: Path) -> None:
    """An attempt resumes at step 9 from memory: the rows since the checkpoint of step 5 are at risk until the next one."""
    translator = EventTranslator(spec_with(), parent_run="")
    memory = {"attempt": 2, "step": 9, "head_step": 5, "resumed_from": "c", "folder": str(tmp_path), "world_size": 1}
    (started,) = translator.translate({**CLAIMED, **memory})
    assert isinstance(started, events.AttemptStarted)
    size = spec_with().order.batch_size
    assert started.gauges() == {"step": 9, "rows_at_risk": 4 * size}
    file = HeartbeatFile(tmp_path, 0)
    # A replica group did step 10 twice.
    file.write(10, Phase.TRAINING, loss_step=9, loss=0.25, spent=Spent(rows=2 * size, began=time.time() - 1))
    (first,) = translator.poll()
    assert isinstance(first, events.ProgressMade)
    assert (first.rows_at_risk, first.gauges()["loss_step"]) == (5 * size, 9)
    commit = {"event": "checkpoint", "at": 2.0, "rows": 4 * size, "rows_by_source": [4 * size], "step": 9}
    facts = {"location": "file:///c", "ledger_snapshot_id": 7, "bytes": 1, "duration_s": 0.1, "checkpoint_id": "d"}
    (committed,) = translator.translate({**commit, **facts})
    assert isinstance(committed, events.CheckpointCommitted)
    assert committed.rows_at_risk == size
    file.close()


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        ({"event": "finished", "step": 4}, "finished"),
        ({"event": "failure", "cause": "rank 1 died", "step": 4}, "failed"),
        ({"event": "error", "message": "NoProgress: 3 attempts"}, "failed"),
        ({"event": "closed"}, "stopped"),
    ],
)
def test_attempt_ends_once(last: dict[str, Any], ending: str) -> None:
    """The first end counts. Without one the supervisor was lost."""
    translator = EventTranslator(spec_with(), parent_run="")
    assert list(translator.translate({**last, "at": 0.0})) == []  # before an attempt
    list(translator.translate({**CLAIMED, "folder": ""}))
    (ended,) = translator.translate({**last, "at": 3.0})
    assert isinstance(ended, events.AttemptEnded)
    assert (ended.ending, ended.at) == (ending, 3.0)
    assert translator.end("lost") == []


def test_giving_up_follows_failed_attempt() -> None:
    """A run that is given up is an event of its own, after the end of its last attempt."""
    translator = EventTranslator(spec_with(), parent_run="")
    list(translator.translate({**CLAIMED, "folder": ""}))
    failure = {"event": "failure", "cause": "rank 1 died", "step": 4, "at": 3.0}
    given_up = {"event": "given_up", "reason": "rank 1 died", "at": 3.1}
    (ended, event) = [each for report in (failure, given_up) for each in translator.translate(report)]
    assert isinstance(ended, events.AttemptEnded)
    assert event == events.RunGivenUp(run="r1", attempt=1, at=3.1, reason="rank 1 died")
