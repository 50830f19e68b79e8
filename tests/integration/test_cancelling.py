"""Dagster runs that are cancelled, and drained, when Dagster cannot reach their processes, on a real instance."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import dagster as dg
import pytest
from dagster._core.errors import DagsterUserCodeUnreachableError

from dlac_pipeline.dagster import heartbeat
from dlac_pipeline.dagster.drain import drain
from dlac_pipeline.dagster.failures import PREEMPTED_TAG, run_tag
from dlac_pipeline.dagster.heartbeat import Heartbeat, beats_of
from dlac_pipeline.dagster.training_runs import model_key
from dlac_pipeline.spec.launch_request import Request
from tests.conftest import Arena, wait_until
from tests.dagster_runs import dagster_run, project

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The interruptions of this process by frequent heartbeats. They are recorded only."""
    found: list[int] = []
    system = SimpleNamespace(getpid=os.getpid, readlink=os.readlink, kill=lambda _, number: found.append(number))
    monkeypatch.setattr(heartbeat, "os", system)
    monkeypatch.setattr(heartbeat, "BEAT_EVERY_S", 0.05)
    return found


def unreachable_run(instance: dg.DagsterInstance, arena: Arena, name: str, *, started: bool = True, **more: Any) -> str:
    """A run that trains and whose code server was killed: its socket is left."""
    server = arena.home / f"server-{name}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(server))
        listening.listen()
    return dagster_run(
        instance,
        arena.spec(name),
        dg.DagsterRunStatus.STARTED if started else dg.DagsterRunStatus.STARTING,
        tags={".dagster/grpc_info": json.dumps({"host": "localhost", "socket": str(server)}), **more.pop("tags", {})},
        **more,
    ).run_id


def terminate(instance: dg.DagsterInstance, run_id: str) -> None:
    """As the button in the UI does."""
    with pytest.raises(DagsterUserCodeUnreachableError):
        instance.run_coordinator.cancel_run(run_id)


def force_terminate(instance: dg.DagsterInstance, run_id: str) -> None:
    """As its tick box does; Dagster waits for nothing."""
    terminate(instance, run_id)
    instance.report_run_canceled(found(instance, run_id))


def give_up(instance: dg.DagsterInstance, run_id: str) -> None:
    """As the sensor does that finds lost runs."""
    instance.report_run_failed(found(instance, run_id))


def found(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRun:
    """The run as it is now."""
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (terminate, dg.DagsterRunStatus.CANCELING),
        pytest.param(force_terminate, dg.DagsterRunStatus.CANCELED, marks=pytest.mark.slow),
        pytest.param(give_up, dg.DagsterRunStatus.FAILURE, marks=pytest.mark.slow),
    ],
)
def test_ended_run_exits_without_code_server(
    arena: Arena,
    instance: dg.DagsterInstance,
    interrupts: list[int],
    end: Callable[[dg.DagsterInstance, str], None],
    status: dg.DagsterRunStatus,
) -> None:
    """Its process is interrupted after an outage of the storage, and only once: the second time would kill its trainer."""
    run_id = unreachable_run(instance, arena, "r")
    away = Mock(wraps=instance, daemon_cursor_storage=instance.daemon_cursor_storage)
    away.get_run_by_id.side_effect = chain(repeat(OSError("the database is away"), 5), repeat(DEFAULT))
    with closing(Heartbeat(away, run_id)):
        end(instance, run_id)
        wait_until(lambda: bool(interrupts), what="the interruption")
        time.sleep(10 * heartbeat.BEAT_EVERY_S)
    assert (interrupts, found(instance, run_id).status) == ([signal.SIGINT], status)


def test_interruption_reaches_heartbeat(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """The step of the model notifies the heartbeat of its process, which does not interrupt again."""
    arena.table()
    reached: list[str] = []

    def supervise(request: Request, on_event: object, *, on_asking: Callable[[], None]) -> Any:
        reached.append("asked")
        on_asking()
        return {"event": "error", "kind": "Fenced", "message": "enough"}, request

    arena.monkeypatch.setattr("dlac_pipeline.dagster.assets.training.supervise_run", supervise)
    arena.monkeypatch.setattr(Heartbeat, "was_interrupted", lambda heart: reached.append("interrupted"))
    spec = arena.spec("r", world_size=1)
    job = project(spec).resolve_implicit_global_asset_job_def().get_subset(asset_selection={model_key("r")})
    assert not job.execute_in_process(instance=instance, raise_on_error=False).success
    assert reached == ["asked", "interrupted"]


@pytest.mark.slow
def test_drain_works_without_code_server(arena: Arena, instance: dg.DagsterInstance, interrupts: list[int]) -> None:
    """All are asked: a re-executed run with old tags too, and a run that starts at the same time, when it beats."""
    first = unreachable_run(instance, arena, "first")
    again = unreachable_run(
        instance, arena, "again", tags={PREEMPTED_TAG: "old"}, parent_run_id=first, root_run_id=first
    )
    late = unreachable_run(instance, arena, "late", started=False)
    drained: list[tuple[list[str], dict[str, str]]] = []
    drains = threading.Thread(target=lambda: drained.append(drain(instance, reason="moved", within_s=240)))
    with closing(Heartbeat(instance, first)), closing(Heartbeat(instance, again)):
        drains.start()
        wait_until(lambda: len(interrupts) == 2, what="the drain")
        with closing(Heartbeat(instance, late)):
            wait_until(lambda: len(interrupts) == 3, what="the drain of the late run")
            for run_id in (first, again, late):
                instance.report_run_canceled(found(instance, run_id))
            drains.join()
    assert [(sorted(left), stayed) for left, stayed in drained] == [(sorted([first, again, late]), {})]
    for run in (found(instance, run_id) for run_id in (first, again, late)):
        assert (run.status, run_tag(run, PREEMPTED_TAG)) == (dg.DagsterRunStatus.CANCELED, "moved")


@pytest.mark.slow
def test_drain_names_remaining_runs(arena: Arena, instance: dg.DagsterInstance, interrupts: list[int]) -> None:
    """It does not report an empty node while it cannot know. A run that a person has cancelled is not interrupted again."""
    starts = unreachable_run(instance, arena, "starts", started=False)
    cancelled = unreachable_run(instance, arena, "cancelled")
    with closing(Heartbeat(instance, cancelled)) as heart:
        heart.was_interrupted()  # by Dagster
        terminate(instance, cancelled)
        left, stayed = drain(instance, reason="moved", within_s=0.0)
        time.sleep(10 * heartbeat.BEAT_EVERY_S)
    assert (left, interrupts) == ([], [])
    assert "it has sent no heartbeat yet" in stayed[starts]
    assert stayed[cancelled] == "it was cancelled before"
    assert PREEMPTED_TAG not in found(instance, cancelled).tags
    assert not beats_of(instance, [starts])
