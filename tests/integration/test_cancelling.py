"""Dagster runs that are cancelled, and drained, when Dagster cannot reach their processes: real ones, on a real instance."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.errors import DagsterUserCodeUnreachableError

from dlac_pipeline.dagster.drain import drain
from dlac_pipeline.dagster.failures import PREEMPTED_TAG, run_tag
from dlac_pipeline.dagster.heartbeat import Heartbeat, beats_of
from dlac_pipeline.dagster.training_runs import model_key
from dlac_pipeline.spec.launch_request import Request
from tests.conftest import Arena, wait_until
from tests.dagster_runs import dagster_run, project

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other

PROCESS_OF_A_RUN = """
import sys, time
import dagster as dg, psutil
from dlac_pipeline.dagster import heartbeat

folder, run_id, how = sys.argv[1:]
heartbeat.BEAT_EVERY_S = 0.2

def away(run_id, times=iter(range(5)), look=dg.DagsterInstance.get_run_by_id):
    for _ in times:
        raise OSError("the database is away")
    return look(instance, run_id)

with dg.DagsterInstance.local_temp(folder) as instance, dg.raise_execution_interrupts():
    if how == "storage away":
        instance.get_run_by_id = away
    heart = heartbeat.Heartbeat(instance, run_id, process=psutil.Process() if how == "another process" else None)
    if how == "interrupted before":
        heart.was_interrupted()
    print("trains", flush=True)
    for word, sleep_s in ("interrupted", 600 if how in ("", "storage away") else 3), ("interrupted again", 3):
        try:
            time.sleep(sleep_s)
            break
        except dg.DagsterExecutionInterruptedError:
            print(word, flush=True)
    heart.close()
    run = instance.get_run_by_id(run_id)
    if not run.is_finished:
        instance.report_run_canceled(run)
"""
"""A heartbeat, and instead of a trainer a sleep; once interrupted, it takes 15 beats to leave."""


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance of this test's own."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster"), overrides={"telemetry": {"enabled": False}}) as made:
        yield made


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


@contextmanager
def process_of(instance: dg.DagsterInstance, run_id: str, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """The process of a run, once it trains."""
    command = [sys.executable, "-c", PROCESS_OF_A_RUN, instance.root_directory, run_id, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n"
            yield process
        finally:
            process.kill()


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


@pytest.mark.soak
@pytest.mark.parametrize(
    ("end", "status", "how"),
    [
        (terminate, dg.DagsterRunStatus.CANCELED, ""),
        (terminate, dg.DagsterRunStatus.CANCELED, "storage away"),
        (force_terminate, dg.DagsterRunStatus.CANCELED, ""),
        (give_up, dg.DagsterRunStatus.FAILURE, ""),
    ],
)
def test_ended_run_exits_without_code_server(
    arena: Arena,
    instance: dg.DagsterInstance,
    end: Callable[[dg.DagsterInstance, str], None],
    status: dg.DagsterRunStatus,
    how: str,
) -> None:
    """Its process is interrupted, once: the second time would kill its trainer."""
    run_id = unreachable_run(instance, arena, "r")
    with process_of(instance, run_id, how) as process:
        end(instance, run_id)
        assert process.communicate(timeout=120)[0] == "interrupted\n"
    assert found(instance, run_id).status == status


@pytest.mark.soak
@pytest.mark.parametrize("how", ["interrupted before", "another process"])
def test_foreign_process_is_not_interrupted(arena: Arena, instance: dg.DagsterInstance, how: str) -> None:
    """Dagster's own interruption came through: the trainer takes its last checkpoint and is not disturbed at it."""
    run_id = unreachable_run(instance, arena, "r")
    with process_of(instance, run_id, how) as process:
        terminate(instance, run_id)
        assert process.communicate(timeout=120)[0] == ""


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


@pytest.mark.soak
def test_drain_works_without_code_server(arena: Arena, instance: dg.DagsterInstance) -> None:
    """All are asked: a re-executed run with old tags too, and a run that starts at the same time, when it beats."""
    first = unreachable_run(instance, arena, "first")
    again = unreachable_run(
        instance, arena, "again", tags={PREEMPTED_TAG: "old"}, parent_run_id=first, root_run_id=first
    )
    late = unreachable_run(instance, arena, "late", started=False)
    drained: list[tuple[list[str], dict[str, str]]] = []
    drains = threading.Thread(target=lambda: drained.append(drain(instance, reason="moved", within_s=240)))
    with process_of(instance, first), process_of(instance, again):
        drains.start()
        wait_until(lambda: found(instance, again).status == dg.DagsterRunStatus.CANCELING, what="the drain")
        with process_of(instance, late):
            drains.join()
    assert [(sorted(left), stayed) for left, stayed in drained] == [(sorted([first, again, late]), {})]
    for run in (found(instance, run_id) for run_id in (first, again, late)):
        assert (run.status, run_tag(run, PREEMPTED_TAG)) == (dg.DagsterRunStatus.CANCELED, "moved")


@pytest.mark.soak
def test_drain_names_remaining_runs(arena: Arena, instance: dg.DagsterInstance) -> None:
    """It does not say that the machine is empty while it cannot know; what a person has cancelled before stays theirs."""
    starts, cancelled = (
        unreachable_run(instance, arena, "starts", started=False),
        unreachable_run(instance, arena, "cancelled"),
    )
    with process_of(instance, cancelled, "interrupted before"):
        terminate(instance, cancelled)
        left, stayed = drain(instance, reason="moved", within_s=0.0)
    assert not left
    assert "it has sent no heartbeat yet" in stayed[starts]
    assert stayed[cancelled] == "it was cancelled before"
    assert PREEMPTED_TAG not in found(instance, cancelled).tags
    assert not beats_of(instance, [starts])
