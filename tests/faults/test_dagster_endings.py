"""Dagster runs that end otherwise than by an error: cancelled, preempted, lost with their machine; with a real daemon."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import dagster as dg
import pytest
from dagster._core.errors import DagsterUserCodeUnreachableError

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, PREEMPTED_TAG, STEPPED_ASIDE_TAG
from dlac_pipeline.supervise.liveness.launch_liveness import is_lock_held
from dlac_pipeline.supervise.liveness.run_lock import lock_path
from jobs.local_dagster import LiveRun, LocalDagster
from tests.conftest import Arena, wait_until
from tests.dagster_runs import check_healed, events_of, gone, job_config, runs_that_recover, sensor_ticks, trained_to

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other


@pytest.mark.soak
def test_cancelled_run_checkpoints_and_stays(campaign: Arena, dagster: LocalDagster) -> None:
    """Cancelled as in the UI: no process or lock is left within the grace period, no step is lost, nobody recovers it."""
    spec = campaign.spec("cancelled", pause_s=0.05, every_steps=1000, grace_s=15.0)
    run_id, processes = trained_to(dagster, spec)
    began = time.time()
    assert dagster.cancel(run_id)
    wait_until(lambda: gone(processes), what="the end of all its processes", within_s=spec.launch.grace_s + 5)
    assert not is_lock_held(lock_path(spec.checkpoint.local, spec.run))
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.CANCELED
    [last] = [row["step"] for row in campaign.lineage(spec.run)]
    assert last == max(entry["step"] for entry in campaign.entries(spec.run))
    observed = events_of(dagster, run_id, dg.DagsterEventType.ASSET_OBSERVATION)
    assert last in [
        event.event_specific_data.asset_observation.metadata["step"].value
        for event in observed
        if "step" in event.event_specific_data.asset_observation.metadata
    ]
    wait_until(lambda: sensor_ticks(dagster, began, sensor="preemption_sensor") >= 3, what="looks of the sensor")
    assert not runs_that_recover(dagster, run_id)


@pytest.mark.soak
def test_preempted_rank_fails_run_and_resumes(campaign: Arena, dagster: LocalDagster) -> None:
    """SIGUSR1 to one rank, as a cluster sends it: an emergency checkpoint, a failure that says why, and one recovery."""
    spec = campaign.spec("preempted", pause_s=0.05)
    run_id, _ = trained_to(dagster, spec)
    rank = LiveRun(spec.checkpoint.store, spec.run).rank(1)
    assert rank is not None
    rank.send_signal(signal.SIGUSR1)
    ended = dagster.wait(run_id)
    assert ended.status == dg.DagsterRunStatus.FAILURE
    assert ended.tags[PREEMPTED_TAG] == "SIGUSR1"
    assert NO_RECOVERY_TAG not in ended.tags
    check_healed(campaign, dagster, spec, run_id)


@pytest.mark.soak
def test_a_drained_run_ends_cancelled_and_is_resumed(campaign: Arena, dagster: LocalDagster) -> None:
    """The drain command empties the node: the run is cancelled, says that this was no person, and goes on."""
    spec = campaign.spec("drained", pause_s=0.05)
    run_id, processes = trained_to(dagster, spec)
    command = [sys.executable, "-m", "dlac_pipeline.dagster.drain", "--reason", "maintenance"]
    done = subprocess.run(command, env=dagster.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"drained ({run_id}): has left\n"
    wait_until(lambda: gone(processes), what="the end of all its processes", within_s=30)
    ended = dagster.wait(run_id)
    assert (ended.status, ended.tags[PREEMPTED_TAG]) == (dg.DagsterRunStatus.CANCELED, "maintenance")
    check_healed(campaign, dagster, spec, run_id)


@pytest.mark.soak
def test_sigterm_to_the_run_worker_is_recovered(campaign: Arena, dagster: LocalDagster) -> None:
    """The worker is told to leave, and nobody cancelled the run: Dagster calls it a failure, and it is resumed."""
    spec = campaign.spec("terminated", pause_s=0.05)
    run_id, processes = trained_to(dagster, spec)
    processes[0].send_signal(signal.SIGTERM)
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.FAILURE
    wait_until(lambda: gone(processes), what="the end of all its processes", within_s=30)
    check_healed(campaign, dagster, spec, run_id)


@pytest.mark.soak
def test_a_killed_code_server_takes_nothing_along(campaign: Arena, dagster: LocalDagster) -> None:
    """SIGKILL of the code server alone: whether Dagster loses the run or not, it is finished by one trainer in the end."""
    spec = campaign.spec("code-server", pause_s=0.05)
    run_id, processes = trained_to(dagster, spec)
    server = processes[0].parent()
    assert server is not None
    server.kill()
    ended = dagster.wait(run_id, timeout_s=180)
    if ended.status == dg.DagsterRunStatus.FAILURE:
        check_healed(campaign, dagster, spec, run_id)
    assert audit_run(campaign.lakehouse, spec.run).finished
    assert campaign.losses(spec.run) == campaign.losses("reference")


@pytest.mark.soak
def test_cancel_works_without_code_server(campaign: Arena, dagster: LocalDagster) -> None:
    """Dagster cannot tell its process; that one finds out, once, and leaves as if it had been told: no step is lost."""
    spec = campaign.spec("unreachable", pause_s=0.05, every_steps=1000, grace_s=15.0)
    run_id, processes = trained_to(dagster, spec)
    server = processes[0].parent()
    assert server is not None
    server.kill()
    with pytest.raises(DagsterUserCodeUnreachableError):
        dagster.cancel(run_id)
    wait_until(lambda: gone(processes), what="the end of all its processes", within_s=spec.launch.grace_s + 20)
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.CANCELED
    [last] = [row["step"] for row in campaign.lineage(spec.run)]
    assert last == max(entry["step"] for entry in campaign.entries(spec.run))
    assert not runs_that_recover(dagster, run_id)


@pytest.mark.soak
def test_two_recoveries_at_once_train_once(campaign: Arena, dagster: LocalDagster) -> None:
    """The same recovery requested twice: one trains, the other steps aside, without a failure that would wake somebody."""
    spec = campaign.spec(
        "twice", pause_s=0.3
    )  # so that the first still trains when the second comes, on a busy machine too
    run_id, _ = trained_to(dagster, spec)
    assert dagster.cancel(run_id)
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.CANCELED
    attempt = campaign.rows(spec.run, "claim")[-1]["attempt"]
    recovery = {"replaces": attempt, "takeover": True, "wait_s": 0.0, "noticed_by": "recovery_sensor"}
    config = {**job_config(spec), "ops": {"model_checkpoint": {"config": recovery}}}
    # Tagged otherwise, so that the queue, which would hold the second back, does not decide.
    ids = [dagster.launch("recover_job", config, tags={"dlac/run": f"twice-{index}"}) for index in range(2)]
    ended = [dagster.wait(each) for each in ids]
    assert [run.status for run in ended] == [dg.DagsterRunStatus.SUCCESS] * 2
    assert len([run for run in ended if STEPPED_ASIDE_TAG in run.tags]) == 1
    assert len(campaign.rows(spec.run, "claim")) == attempt + 1
    assert campaign.losses(spec.run) == campaign.losses("reference")


@pytest.mark.soak
def test_queue_allows_one_trainer_per_run(campaign: Arena, dagster: LocalDagster) -> None:
    """Three Dagster runs of two training runs: those of the same name train one after the other, the other one beside them."""
    one, other = campaign.spec("one", pause_s=0.5), campaign.spec("other")
    ids = [dagster.launch("train_job", job_config(spec)) for spec in (one, one, other)]
    ended = [dagster.wait(each) for each in ids]
    assert [run.status for run in ended] == [dg.DagsterRunStatus.SUCCESS] * 3
    assert ended[1].tags["dlac/run"] == "one"
    with dagster.instance() as instance:
        records = [instance.get_run_record_by_id(each) for each in ids]
    times = [(record.start_time or 0.0, record.end_time or 0.0) for record in records if record is not None]
    (_, first_ended), (second_began, _), (beside_began, _) = times
    assert 0.0 < beside_began < first_ended <= second_began
    assert len(campaign.rows("one", "claim")) == 1  # the second found it finished
