"""The Dagster definitions of this project: names, descriptions, what starts automatically, and the check of a rehearsal."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest
import yaml
from dagster._core.events import RunFailureReason
from dagster._core.execution.retries import auto_reexecution_should_retry_run

from dlac_pipeline.dagster import IcebergTable, TrainingRun
from dlac_pipeline.dagster.assets.checks import rehearse_model
from dlac_pipeline.dagster.training_runs import RUNS_JOB, model_key, plan_key
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import DlacError, NoRestorableCheckpoint, NothingToRehearse
from dlac_pipeline.lakehouse.iceberg.connect import connect
from examples.demo.local_dagster import SETTINGS
from jobs import definitions
from tests.small_records import raw_spec

ON = ("recovery_sensor", "preemption_sensor", "lost_run_sensor")
ALERTS = ("dlac_failure_alerts", "dlac_success_alerts", "dlac_check_alerts", "dlac_failed_run_check_alerts")
OFF_SENSORS = ("new_snapshot_sensor", "registration_sensor", *ALERTS)
SCHEDULES = {
    "continual_training_schedule": RUNS_JOB,
    "upkeep_job_schedule": "upkeep_job",
    "verify_job_schedule": "verify_job",
    "rehearse_job_schedule": "rehearse_job",
}
SPEC = raw_spec(launch={"script": "/train.py"})
defs = dg.Definitions.merge(
    definitions.defs, TrainingRun(spec=SPEC, owners=["team:t"], source_assets={"src.t": "tokens"}).build_in(Path())
)
"""Definitions of the project with one training run."""


def test_code_location_has_exact_definitions() -> None:
    """Renaming or dropping a definition breaks schedules and links of users, so it must be deliberate."""
    repository = defs.get_repository_def()
    assets = {key.to_user_string() for key in repository.asset_graph.get_all_asset_keys()}
    assert assets == {"corpus", "tokens", "plans/r", "models/r"}
    checks = {key.name for key in repository.asset_graph.asset_check_keys}
    assert checks == {"no_duplicate_rows", "no_missing_rows", "consumption_exact", "checkpoint_restorable"}
    jobs = {"ingest_job", "training_runs_job", "upkeep_job", "verify_job", "rehearse_job", "register_job"}
    assert set(repository.job_names) - {"__ASSET_JOB"} == jobs
    assert {sensor.name for sensor in repository.sensor_defs} == {*ON, *OFF_SENSORS}
    assert {schedule.name for schedule in repository.schedule_defs} == set(SCHEDULES)


def test_only_recovery_starts_automatically() -> None:
    """Loading the code location starts recoveries only: no training, upkeep, verification or alert starts automatically."""
    repository = defs.get_repository_def()
    for sensor in repository.sensor_defs:
        running = sensor.default_status == dg.DefaultSensorStatus.RUNNING
        assert running == (sensor.name in ON), sensor.name
    for name, job in SCHEDULES.items():
        schedule = repository.get_schedule_def(name)
        assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED
        assert schedule.job_name == job


@pytest.mark.filterwarnings("ignore")  # Dagster calls observed assets beta
@pytest.mark.parametrize("table", ["lake.my-points", "lake.a b", "lake.när", "lake._raw"])
def test_plan_depends_on_table(table: str) -> None:
    """The plan depends on the asset of its table, also where Dagster refuses a character of the name."""
    spec = {**SPEC, "source": {"table": table, "columns": ["x"]}}
    context = dg.ComponentTree.for_test().load_context
    observed = IcebergTable(table=table).build_defs(context).get_repository_def().asset_graph
    planned = TrainingRun(spec=spec).build_in(Path()).get_repository_def().asset_graph
    assert planned.get(plan_key("r")).parent_keys == observed.observable_asset_keys


@pytest.mark.parametrize("of_steps", [True, False])
def test_dagster_retries_no_training(of_steps: bool) -> None:
    """Dagster's own retries stay off for training, even if they are enabled for everything. Only the sensor recovers runs."""
    retries = {"enabled": True, "max_retries": 3, "retry_on_asset_or_op_failure": of_steps}
    with dg.DagsterInstance.ephemeral(settings={"run_retries": retries}) as instance:

        def retried(name: str) -> bool:
            job, state = defs.resolve_job_def(name), dg.DagsterRunStatus.FAILURE
            run = instance.create_run_for_job(job, status=state, tags=job.run_tags)
            return bool(auto_reexecution_should_retry_run(instance, run, RunFailureReason.RUN_EXCEPTION))

        assert retried("verify_job")
        assert not retried(RUNS_JOB)


def test_queue_has_no_limit() -> None:
    """Recoveries wait for no backlog. Of one training run one tagged Dagster run is in progress."""
    settings = yaml.safe_load(SETTINGS.read_text())
    with dg.DagsterInstance.ephemeral(settings=settings):
        queue = dg.QueuedRunCoordinator(**settings["run_coordinator"]["config"]).get_run_queue_config()
    assert queue.max_concurrent_runs == -1
    assert [limit["key"] for limit in queue.tag_concurrency_limits] == ["dlac/run"]


ERROR, WARN = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN


@pytest.mark.parametrize(
    ("error", "severity"),
    [(NothingToRehearse("no successor"), WARN), (NoRestorableCheckpoint("all are damaged"), ERROR)],
)
def test_impossible_rehearsal_is_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: DlacError, severity: dg.AssetCheckSeverity
) -> None:
    """A run that cannot be rehearsed proves nothing about its checkpoints. Every other error is one of the run."""
    monkeypatch.setattr("dlac_pipeline.extensions.replay.rehearse.rehearse_run", Mock(side_effect=error))
    result = rehearse_model(connect(LakehouseConfig().at_home(tmp_path)), "r")
    assert (result.passed, result.severity, result.asset_key) == (False, severity, model_key("r"))
