"""Dagster runs that are cancelled when Dagster cannot reach their processes, on a real instance."""

import json
import os
import signal
import socket
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
from dlac_pipeline.dagster.heartbeat import Heartbeat
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


def found(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRun:
    """The run as it is now."""
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return run


def test_unreachable_run_is_interrupted_once(arena: Arena, instance: dg.DagsterInstance, interrupts: list[int]) -> None:
    """Its process is interrupted after an outage of the storage, and only once: the second time would kill its trainer."""
    server = str(arena.home / "server")  # it was killed, and its socket is left
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(server)
        listening.listen()
    tags = {".dagster/grpc_info": json.dumps({"host": "localhost", "socket": server})}
    run_id = dagster_run(instance, arena.spec("r"), dg.DagsterRunStatus.STARTED, tags=tags).run_id
    away = Mock(wraps=instance, daemon_cursor_storage=instance.daemon_cursor_storage)
    away.get_run_by_id.side_effect = chain(repeat(OSError("the database is away"), 5), repeat(DEFAULT))
    with closing(Heartbeat(away, run_id)):
        with pytest.raises(DagsterUserCodeUnreachableError):
            instance.run_coordinator.cancel_run(run_id)  # as the button in the UI does
        wait_until(lambda: bool(interrupts), what="the interruption")
        time.sleep(10 * heartbeat.BEAT_EVERY_S)
    assert (interrupts, found(instance, run_id).status) == ([signal.SIGINT], dg.DagsterRunStatus.CANCELING)


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
