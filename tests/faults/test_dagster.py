"""A training run under a real Dagster daemon whose processes are killed: it recovers, and no process outlives it."""

import time
from typing import Any

import dagster as dg
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster.assets.training import POOL
from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG
from dlac_pipeline.dagster.training_runs import model_key
from examples.demo.live_run import LiveRun
from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena, wait_until
from tests.dagster_runs import (
    check_healed,
    events_of,
    have_ended,
    runs_that_recover,
    sensor_ticks,
    train_to,
    wait_for_step,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries cause warnings
STEPS = 50
RUNS: dict[str, dict[str, Any]] = {
    "dagster-dagster": {"steps": STEPS, "pause_s": 0.05},
    "observed": {"passes": 1},
    "hopeless-dagster": {"columns": ["no_such_column"]},
}
"""Training runs of the code location, with their settings."""


@pytest.mark.slow
def test_killed_dagster_run_is_recovered(campaign: Arena, dagster: LocalDagster) -> None:
    """SIGKILL of the Dagster run's process: all ranks exit, and a recovery finishes the run exactly, in the killed one's slot."""
    with dagster.instance() as instance:
        instance.event_log_storage.set_concurrency_slots(POOL, 1)
    spec = campaign.spec("dagster-dagster", **RUNS["dagster-dagster"])
    live = LiveRun(spec.checkpoint.store, spec.run)
    run_id = dagster.train(spec.run)
    wait_for_step(live, dagster, run_id, 15)
    supervisor = live.supervisor()
    assert supervisor is not None
    doomed = [supervisor, *supervisor.children(recursive=True)]
    assert live.kill_dagster_run()
    wait_until(lambda: have_ended(doomed), what="the end of all its processes")
    assert dagster.wait(run_id).status == dg.DagsterRunStatus.FAILURE
    recovery = dagster.wait(dagster.recovery_of(run_id, timeout_s=300.0))
    assert recovery.status == dg.DagsterRunStatus.SUCCESS
    assert audit_run(campaign.lakehouse, spec.run).exact
    reference = campaign.journal("reference")
    assert campaign.losses(spec.run) == campaign.losses("reference")[:STEPS]
    assert campaign.journal(spec.run) == {step: reference[step] for step in range(1, STEPS + 1)}
    checks = events_of(dagster, recovery.run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    assert [check.event_specific_data.passed for check in checks] == [True] * 4
    assert {check.event_specific_data.asset_key for check in checks} == {model_key(spec.run)}


@pytest.mark.soak
def test_run_of_new_file_is_recovered(campaign: Arena, dagster: LocalDagster) -> None:
    """The job file was written after the daemon started. The sensor waits until the code location is loaded again."""
    spec = campaign.spec("dagster-new", pause_s=0.05)
    dagster.write_job_file(spec)
    run_id, processes = train_to(dagster, spec)
    processes[0].kill()
    check_healed(campaign, dagster, spec, run_id)


@pytest.mark.soak
def test_checkpoints_are_observations_with_pictures(campaign: Arena, dagster: LocalDagster) -> None:
    """The asset's page shows step, loss and rows of each checkpoint, and the loss curve at the end."""
    spec = campaign.spec("observed", **RUNS["observed"])
    ended = dagster.wait(dagster.train(spec.run))
    assert ended.status == dg.DagsterRunStatus.SUCCESS
    observed = events_of(dagster, ended.run_id, dg.DagsterEventType.ASSET_OBSERVATION)
    shown = [event.event_specific_data.asset_observation.metadata for event in observed]
    lineage = campaign.lineage(spec.run)
    assert [entry["checkpoint_id"].value for entry in shown] == [row.checkpoint_id for row in lineage]
    assert [entry["loss"].value for entry in shown] == [row.losses[-1] for row in lineage]
    made = events_of(dagster, ended.run_id, dg.DagsterEventType.ASSET_MATERIALIZATION)
    metadata = made[-1].event_specific_data.materialization.metadata
    for picture in ("loss_curve", "coverage", "checkpoint_cost", "time"):
        assert metadata[picture].value.startswith(("![Loss", "![Coverage", "![Cost", "![Time"))
    shown_last = metadata["last_checkpoints"].value.records[0].data
    assert (shown_last["checkpoint_id"], shown_last["state"]) == (lineage[-1].checkpoint_id, "head")


@pytest.mark.soak
def test_permanent_failure_is_not_recovered(campaign: Arena, dagster: LocalDagster) -> None:
    """A wrong column fails the Dagster run with its reason. The sensor evaluates the run, and does not recover it."""
    ended = dagster.wait(dagster.train(campaign.spec("hopeless-dagster", **RUNS["hopeless-dagster"]).run))
    moment = time.time()
    assert ended.status == dg.DagsterRunStatus.FAILURE
    assert ended.tags[NO_RECOVERY_TAG] == "NoSuchColumn"
    failures = events_of(dagster, ended.run_id, dg.DagsterEventType.STEP_FAILURE)
    assert "no_such_column" in str(failures[0].event_specific_data.error)
    wait_until(lambda: sensor_ticks(dagster, moment) >= 2, what="two looks of the sensor")
    assert not runs_that_recover(dagster, ended.run_id)
