"""What Dagster's sensors and checks decide, on a real lakehouse and a real instance, without a daemon."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from dlac_pipeline.dagster.failures import PREEMPTED_TAG
from dlac_pipeline.dagster.heartbeat import Heartbeat
from dlac_pipeline.dagster.maintenance import verify_job
from dlac_pipeline.dagster.sensors.lost_runs import lost_run_sensor
from dlac_pipeline.dagster.settings import FILE
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints
from dlac_pipeline.lakehouse.ledger.typed_rows import VerifyRow
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from jobs.definitions import defs
from tests.conftest import Arena
from tests.dagster_runs import dagster_run, recovery_requested

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other


def test_run_without_process_is_lost(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Of three runs, one without a process fails, a cancelled one is cancelled, and a living one continues."""
    (home / FILE).write_text("[recovery]\ngone_after_s = 0.2\nlost_after_s = 60\n")
    spec = arena.spec("lost")
    states = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
    alive, dead, cancelled = (dagster_run(instance, spec, state) for state in states)
    heart = Heartbeat(instance, alive.run_id)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        for run in (dead, cancelled):
            Heartbeat(instance, run.run_id, process=psutil.Process(process.pid)).close()
        cursor, said = look(instance, None)
        assert said == "all 3 runs that train are alive"
        process.send_signal(signal.SIGKILL)
    time.sleep(0.3)
    cursor, said = look(instance, cursor)
    heart.close()
    assert f"run {dead.run_id}: its process {process.pid} is gone" in said
    found = [instance.get_run_by_id(run.run_id) for run in (alive, dead, cancelled)]
    assert [run.status for run in found if run] == [
        dg.DagsterRunStatus.STARTED,
        dg.DagsterRunStatus.FAILURE,
        dg.DagsterRunStatus.CANCELED,
    ]


def look(instance: dg.DagsterInstance, cursor: str | None) -> tuple[str | None, str]:
    """Evaluate the sensor once. Return its new cursor and its messages."""
    data = lost_run_sensor.evaluate_tick(dg.build_sensor_context(instance=instance, cursor=cursor))
    return data.cursor, data.skip_message or ""


@pytest.mark.slow
def test_run_with_manual_launch_stays(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """While a process holds the lock of the launch there is nothing to recover. Afterwards there is, with one key."""
    arena.table()
    spec = arena.trained("by-hand", world_size=1, until=15)
    dead = dagster_run(instance, spec, dg.DagsterRunStatus.FAILURE)
    with run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=False):
        skipped = recovery_requested(instance, dead)
        assert isinstance(skipped, dg.SkipReason)
        assert "launch by hand (attempt 1)" in str(skipped.skip_message)
    request, again = recovery_requested(instance, dead), recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    assert isinstance(again, dg.RunRequest)
    assert again.run_key == request.run_key
    assert request.run_config["ops"]["models__by_hand"]["config"]["replaces"] == 1


def test_the_verify_job_finds_damage_and_records_it(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """A checkpoint that holds is recorded and not read again within its time; a damaged one fails the job by its file."""
    arena.table()
    spec = arena.trained("verified", world_size=1, until=25)
    config = {"ops": {"newest_checkpoints_verified": {"config": {"not_since_h": 1.0}}}}

    def verify(**changes: Any) -> dg.ExecuteInProcessResult:
        job = defs.resolve_job_def(verify_job.name)
        return job.execute_in_process(instance=instance, run_config={**config, **changes}, raise_on_error=False)

    assert verify().success
    assert verify().success
    assert len(arena.rows(spec.run, VerifyRow)) == 1
    folder = Path(list_checkpoints(arena.lakehouse, spec.run)[-1].folder.removeprefix("file://"))
    damaged = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    again = verify(ops={"newest_checkpoints_verified": {"config": {"not_since_h": 0.0}}})
    assert not again.success
    assert damaged.name in str(again.all_node_events[-1].event_specific_data or again.get_run_failure_event())
    assert arena.rows(spec.run, VerifyRow)[-1].problem is not None


def test_preempted_cancelled_run_is_recovered(instance: dg.DagsterInstance, arena: Arena) -> None:
    """The sensor on cancelled runs skips runs that a person cancelled, and reports it."""
    sensor = defs.get_repository_def().get_sensor_def("preemption_sensor")
    arena.table()
    spec = arena.spec("cancelled", world_size=1)
    by_person = dagster_run(instance, spec, dg.DagsterRunStatus.CANCELED)
    by_machine = dagster_run(instance, spec, dg.DagsterRunStatus.CANCELED, tags={PREEMPTED_TAG: "SIGTERM"})
    answers: list[Any] = []
    for run in (by_person, by_machine):
        event = instance.report_run_canceled(run)
        answers.append(sensor(dg.build_run_status_sensor_context(sensor.name, event, instance, run)))
    assert isinstance(answers[0], dg.SkipReason)
    [request] = answers[1]
    assert isinstance(request, dg.RunRequest)
