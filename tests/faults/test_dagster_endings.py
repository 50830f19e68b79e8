"""Dagster runs that are cancelled, preempted or lost with their node, with a real daemon."""

import signal
import subprocess
import sys
import time
from typing import Any

import dagster as dg
import pytest
from dagster._core.errors import DagsterUserCodeUnreachableError

from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, PREEMPTED_TAG, STEPPED_ASIDE_TAG
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.supervise.liveness.launch_liveness import is_lock_held
from dlac_pipeline.supervise.liveness.run_lock import lock_path
from examples.demo.live_run import LiveRun
from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena, wait_until
from tests.dagster_runs import check_healed, events_of, have_ended, runs_that_recover, sensor_ticks, train_to

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries cause warnings
SLOW: dict[str, Any] = {"pause_s": 0.05}
ONE_CHECKPOINT: dict[str, Any] = {"pause_s": 0.05, "every_steps": 1000, "deadline_s": 15.0}
RUNS: dict[str, dict[str, Any]] = {
    "cancelled": ONE_CHECKPOINT,
    **dict.fromkeys(("preempted", "drained", "terminated"), SLOW),
    "unreachable": ONE_CHECKPOINT,
    "twice": {"pause_s": 0.3},  # so that the first recovery still trains when the second starts, even on a busy node
    "doubled": {"pause_s": 0.3},
    "one": {"pause_s": 0.5},
    "other": {},
}
"""Training runs of the code location, with their settings."""


@pytest.mark.soak
@pytest.mark.parametrize("run", ["cancelled", "unreachable"])
def test_cancelled_run_checkpoints_and_stays(campaign: Arena, dagster: LocalDagster, run: str) -> None:
    """A run cancelled in the UI, or found to be by its process, leaves no process or lock, loses no step, and stays ended."""
    spec = campaign.spec(run, **RUNS[run])
    run_id, processes = train_to(dagster, spec)
    began = time.time()
    if run == "cancelled":
        assert dagster.cancel(run_id)
    else:
        server = processes[0].parent()
        assert server is not None
        server.kill()
        with pytest.raises(DagsterUserCodeUnreachableError):
            dagster.cancel(run_id)
    within_s = spec.launch.deadline_s + (5 if run == "cancelled" else 20)
    wait_until(lambda: have_ended(processes), what="the end of all its processes", within_s=within_s)
    assert not is_lock_held(lock_path(spec.checkpoint.local, spec.run))
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.CANCELED
    [last] = [row.step for row in campaign.lineage(spec.run)]
    assert last == max(entry["step"] for entry in campaign.entries(spec.run))
    if run == "cancelled":
        observed = events_of(dagster, run_id, dg.DagsterEventType.ASSET_OBSERVATION)
        shown = [event.event_specific_data.asset_observation.metadata for event in observed]
        assert last in [each["step"].value for each in shown if "step" in each]
        wait_until(lambda: sensor_ticks(dagster, began, sensor="preemption_sensor") >= 3, what="looks of the sensor")
    assert not runs_that_recover(dagster, run_id)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "status", "tag"),
    [
        ("preempted", dg.DagsterRunStatus.FAILURE, "SIGUSR1"),
        ("drained", dg.DagsterRunStatus.CANCELED, "maintenance"),
        ("terminated", dg.DagsterRunStatus.FAILURE, None),
    ],
)
def test_ended_run_is_resumed(
    campaign: Arena, dagster: LocalDagster, how: str, status: dg.DagsterRunStatus, tag: str | None
) -> None:
    """SIGUSR1 to one rank, the drain command, and SIGTERM to the worker are no cancellation: one recovery resumes the run."""
    spec = campaign.spec(how, **RUNS[how])
    run_id, processes = train_to(dagster, spec)
    if how == "preempted":
        rank = LiveRun(spec.checkpoint.store, spec.run).rank(1)
        assert rank is not None
        rank.send_signal(signal.SIGUSR1)
    elif how == "drained":
        command = [sys.executable, "-m", "dlac_pipeline.dagster.drain", "--reason", "maintenance"]
        done = subprocess.run(command, env=dagster.environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"drained ({run_id}): has exited\n"), done.stderr
    else:
        processes[0].send_signal(signal.SIGTERM)
    ended = dagster.wait(run_id)
    assert ended.status == status
    assert NO_RECOVERY_TAG not in ended.tags
    assert tag is None or ended.tags[PREEMPTED_TAG] == tag
    wait_until(lambda: have_ended(processes), what="the end of all its processes", within_s=30)
    check_healed(campaign, dagster, spec, run_id)


@pytest.mark.soak
def test_two_recoveries_at_once_train_once(campaign: Arena, dagster: LocalDagster) -> None:
    """The same recovery is requested twice. The second steps aside without a failure that alerts anyone."""
    spec = campaign.spec("twice", **RUNS["twice"])
    run_id, _ = train_to(dagster, spec)
    assert dagster.cancel(run_id)
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.CANCELED
    attempt = campaign.rows(spec.run, ClaimRow)[-1].attempt
    recovery = {"replaces": attempt, "takeover": True, "wait_s": 0.0, "noticed_by": "recovery_sensor"}
    # Without the tag of the training run, the queue does not hold the second one back.
    ids = [dagster.train(spec.run, config=recovery) for _ in range(2)]
    ended = [dagster.wait(each) for each in ids]
    assert [run.status for run in ended] == [dg.DagsterRunStatus.SUCCESS] * 2
    assert len([run for run in ended if STEPPED_ASIDE_TAG in run.tags]) == 1
    assert len(campaign.rows(spec.run, ClaimRow)) == attempt + 1
    assert campaign.losses(spec.run) == campaign.losses("reference")


@pytest.mark.soak
def test_queue_allows_one_trainer_per_run(campaign: Arena, dagster: LocalDagster) -> None:
    """Of three tagged Dagster runs, two with one name train in turn, beside a run with a second name."""
    ids = [dagster.train(run, tags={"dlac/run": run}) for run in ("one", "one", "other")]
    ended = [dagster.wait(each) for each in ids]
    assert [run.status for run in ended] == [dg.DagsterRunStatus.SUCCESS] * 3
    with dagster.instance() as instance:
        records = [instance.get_run_record_by_id(each) for each in ids]
    times = [(record.start_time or 0.0, record.end_time or 0.0) for record in records if record is not None]
    (_, first_ended), (second_began, _), (beside_began, _) = times
    assert 0.0 < beside_began < first_ended <= second_began
    assert len(campaign.rows("one", ClaimRow)) == 1  # the second Dagster run found it finished


@pytest.mark.soak
def test_second_materialization_is_refused(campaign: Arena, dagster: LocalDagster) -> None:
    """*Materialize* of a run that trains fails and names its trainer, which continues. No sensor launches it again."""
    spec = campaign.spec("doubled", **RUNS["doubled"])
    run_id, _ = train_to(dagster, spec)
    refused = dagster.wait(dagster.train(spec.run))
    assert (refused.status, refused.tags[NO_RECOVERY_TAG]) == (dg.DagsterRunStatus.FAILURE, "RunBusy")
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.SUCCESS
    assert not runs_that_recover(dagster, refused.run_id)
    assert len(campaign.rows(spec.run, ClaimRow)) == 1
