"""What a Dagster run makes of its supervisor's words when it is slow to write them down, or cannot."""

from __future__ import annotations

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
from dlac_pipeline.dagster.assets.supervised import _Voice, supervise_launch
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request

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
def talking(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun to talk: how long it took to start counts for no bound."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [])
        yield process


@pytest.mark.parametrize("bound", ["silent_s", "within_s"])
def test_slow_receiver_loses_no_event(bound: str) -> None:
    """Time in which nobody listened is no silence; and what a supervisor has said by the end of its time is not lost."""
    with talking(TALKS) as process:
        heard = []
        for event in _Voice(process).events(**{bound: BOUND_S}):
            heard.append(event)
            if len(heard) == 1:
                assert process.stdin is not None
                process.stdin.close()
                process.wait()
                time.sleep(BOUND_S + 0.1)
    assert (len(heard), heard[-1]) == (21, {"event": "ended"})


@pytest.mark.parametrize("bound", ["silent_s", "within_s"])
def test_silent_supervisor_is_given_up(bound: str) -> None:
    """It is still there, and not waited for."""
    with talking(STAYS) as process:
        voice = _Voice(process)
        heard = list(voice.events(**{bound: BOUND_S}))
        assert voice.open
        process.kill()
    assert heard == [{"event": "step"}]


def test_printed_text_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    """A library, or a user's transform, wrote where events come from: the events are heard, and the rest is logged."""
    talks = "print('loading', flush=True)\n" + TALKS + "print('[]')\nprint('7')\nprint(b'\\xff')\n"
    with subprocess.Popen([sys.executable, "-c", talks], stdout=subprocess.PIPE) as process:
        heard = list(_Voice(process).events())
    assert (len(heard), heard[-1]) == (21, {"event": "ended"})
    assert [record.args for record in caplog.records] == [("loading",), ("[]",), ("7",), ("b'\\xff'",)]


def test_failed_display_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dagster's storage is away: what the run came to is told all the same, and what was not shown is logged."""

    def storage_is_away(event: dict[str, Any]) -> None:
        raise OSError("the database is away")

    assert supervise_launch(a_request(tmp_path), storage_is_away)["kind"] == "CatalogUnreachable"
    assert "the event error could not be shown, training goes on: the database is away" in caplog.text


def test_interruption_during_display_ends_run(tmp_path: Path) -> None:
    """It comes as an exception wherever the process is; who listens for a cancellation is told of it."""
    told: list[str] = []

    def interrupted(event: dict[str, Any]) -> None:
        raise DagsterExecutionInterruptedError

    with pytest.raises(DagsterExecutionInterruptedError):
        supervise_launch(a_request(tmp_path), interrupted, on_asking=lambda: told.append("asked"))
    assert told == ["asked"]


def test_last_events_of_nodes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launcher listens to them for longer than ranks take to leave."""
    program = tmp_path / "supervisor"
    program.write_text(f"#!{sys.executable}\n{LINGERS}")
    program.chmod(0o755)
    monkeypatch.setattr(module, "_MARGIN_S", 0.0)
    request = a_request(tmp_path)
    launch = request.spec.launch.model_copy(update={"on": "slurm", "grace_s": 0.1})
    request = request.model_copy(update={"spec": request.spec.model_copy(update={"launch": launch})})
    heard: list[str] = []

    def interrupted(event: dict[str, Any]) -> None:
        heard.append(event["event"])
        if len(heard) == 1:
            raise DagsterExecutionInterruptedError

    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(DagsterExecutionInterruptedError):
        supervise_launch(request, interrupted)
    assert heard == ["step", "ended"]


def a_request(folder: Path) -> Request:
    """A job that cannot begin, because a file stands where the folder of its catalog should be."""
    (folder / "file").touch()
    (folder / "train.py").touch()
    away = LakehouseConfig(uri=f"sqlite:///{folder}/file/catalog.db", warehouse=f"file://{folder}/warehouse")
    raw = {
        "run": "r",
        "source": {"table": "src.t", "columns": ["x"]},
        "order": {"batch_size": 32},
        "launch": {"script": str(folder / "train.py")},
        "lakehouse": away.model_dump(),
    }
    return Request(spec=parse_spec(raw, origin="the test").resolved(folder / "home"))
