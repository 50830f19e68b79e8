"""Events of a supervisor in a Dagster run that stores them slowly, or cannot store them."""

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterExecutionInterruptedError

from dlac_pipeline.dagster.assets import supervised as module
from dlac_pipeline.dagster.assets.supervised import Voice, supervise_launch
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.spec.launch_request import Request
from tests.small_records import small_spec

TALKS = """
import json, sys
print(json.dumps({"event": "step", "step": 0}), flush=True)
sys.stdin.read()
for step in range(1, 20):
    print(json.dumps({"event": "step", "step": step}), flush=True)
print(json.dumps({"event": "ended"}), flush=True)
"""
BOUND_S = 0.5
STAYS = 'import time; print(\'{"event": "step"}\', flush=True); time.sleep(60)'


LINGERS = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print('{"event": "step"}', flush=True)
signal.sigwait([signal.SIGTERM])
time.sleep(2)
print('{"event": "ended"}', flush=True)
"""


@contextmanager
def talking_process(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process after its first output, so that its start counts for no limit."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [])
        yield process


@pytest.mark.parametrize("bound", ["silent_s", "within_s"])
def test_slow_receiver_loses_no_event(bound: str) -> None:
    """Time without a reader is no silence, and events of a supervisor before its deadline are not lost."""
    with talking_process(TALKS) as process:
        events = []
        for event in Voice(process).events(**{bound: BOUND_S}):
            events.append(event)
            if len(events) == 1:
                assert process.stdin is not None
                process.stdin.close()
                process.wait()
                time.sleep(BOUND_S + 0.1)
    assert (len(events), events[-1]) == (21, {"event": "ended"})


@pytest.mark.parametrize("bound", ["silent_s", "within_s"])
def test_silent_supervisor_is_given_up(bound: str) -> None:
    """The process still runs, but the reader stops waiting."""
    with talking_process(STAYS) as process:
        voice = Voice(process)
        events = list(voice.events(**{bound: BOUND_S}))
        assert voice.open
        process.kill()
    assert events == [{"event": "step"}]


def test_printed_text_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    """A library or a user's transform prints to the stream of events. The events are read, and the rest is logged."""
    talks = "print('loading', flush=True)\n" + TALKS + "print('[]')\nprint('7')\nprint(b'\\xff')\n"
    with subprocess.Popen([sys.executable, "-c", talks], stdout=subprocess.PIPE) as process:
        events = list(Voice(process).events())
    assert (len(events), events[-1]) == (21, {"event": "ended"})
    assert [record.args for record in caplog.records] == [("loading",), ("[]",), ("7",), ("b'\\xff'",)]


def test_interruption_during_display_ends_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interruption is an exception at any point of the process. A listener for cancellations is called."""
    requests: list[str] = []
    supervise_by(STAYS, tmp_path, monkeypatch)

    def interrupt(event: dict[str, Any]) -> None:
        raise DagsterExecutionInterruptedError

    with pytest.raises(DagsterExecutionInterruptedError):
        supervise_launch(failing_request(tmp_path), interrupt, on_asking=lambda: requests.append("asked"))
    assert requests == ["asked"]


def test_last_events_of_nodes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher reads their events for longer than ranks take to exit."""
    supervise_by(LINGERS, tmp_path, monkeypatch)
    monkeypatch.setattr(module, "MARGIN_S", 0.0)
    request = failing_request(tmp_path)
    launch = request.spec.launch.model_copy(update={"on": "slurm", "deadline_s": 0.1})
    request = request.model_copy(update={"spec": request.spec.model_copy(update={"launch": launch})})
    events: list[str] = []

    def interrupt(event: dict[str, Any]) -> None:
        events.append(event["event"])
        if len(events) == 1:
            raise DagsterExecutionInterruptedError

    with pytest.raises(DagsterExecutionInterruptedError):
        supervise_launch(request, interrupt)
    assert events == ["step", "ended"]


def supervise_by(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program stand in for the supervisor."""
    program = folder / "supervisor"
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def failing_request(folder: Path) -> Request:
    """Return a job that cannot start, because a file is in the place of its catalog's folder."""
    (folder / "file").touch()
    (folder / "train.py").touch()
    away = LakehouseConfig(uri=f"sqlite:///{folder}/file/catalog.db", warehouse=f"file://{folder}/warehouse")
    spec = small_spec(launch={"script": str(folder / "train.py")}, lakehouse=away.model_dump())
    return Request(spec=spec.resolved(folder / "home"))
