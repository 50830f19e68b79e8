"""The Dagster definitions of this repository's project: names, descriptions, and what starts automatically."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.events import RunFailureReason
from dagster._core.execution.retries import auto_reexecution_should_retry_run

from dlac_pipeline.dagster import IcebergTable, TrainingRun
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.dagster.training_runs import RUNS_JOB, model_key, plan_key
from dlac_pipeline.lakehouse.config import LakehouseConfig
from examples.demo.local_dagster import SETTINGS
from jobs import definitions
from tests.small_records import raw_spec

ON = ("recovery_sensor", "preemption_sensor", "lost_run_sensor")
OFF_SENSORS = (
    "new_snapshot_sensor",
    "registration_sensor",
    "dlac_failure_alerts",
    "dlac_success_alerts",
    "dlac_check_alerts",
    "dlac_failed_run_check_alerts",
)
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


def test_every_asset_has_description() -> None:
    """An asset without a description is useless to a user of the graph."""
    graph = defs.get_repository_def().asset_graph
    for key in graph.get_all_asset_keys():
        description = graph.get(key).description
        assert description is not None, key
        assert description.startswith("One "), key


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


def test_model_has_pool_owner_and_kinds() -> None:
    """The limit of the pool bounds how many training runs share a node. The page of an asset names its owner."""
    graph = defs.get_repository_def().asset_graph
    assert graph.get(model_key("r")).pools == {"trainers"}
    for key in graph.get_all_asset_keys():
        assert graph.get(key).owners, key
        assert graph.get(key).kinds, key


@pytest.mark.filterwarnings("ignore")  # Dagster calls observed assets beta
@pytest.mark.parametrize("table", ["lake.my-points", "lake.a b", "lake.när", "lake._raw"])
def test_plan_depends_on_table(table: str) -> None:
    """The plan depends on the asset of its table, also where Dagster refuses a character of the name."""
    spec = {**SPEC, "source": {"table": table, "columns": ["x"]}}
    context = dg.ComponentTree.for_test().load_context
    observed = IcebergTable(table=table).build_defs(context).get_repository_def().asset_graph
    planned = TrainingRun(spec=spec).build_in(Path()).get_repository_def().asset_graph
    assert planned.get(plan_key("r")).parent_keys == observed.observable_asset_keys


def test_training_has_checks_but_no_rehearsal() -> None:
    """A rehearsal costs a launch, so it is an attribute of the component, and has a separate job."""
    steps = {node.name for node in defs.resolve_job_def(RUNS_JOB).nodes}
    assert steps == {"plans__r", "models__r", "models__r_audit", "models__r_checkpoint_restorable"}


def test_lakehouse_jobs_allow_any_catalog() -> None:
    """The resource of upkeep, verification and rehearsals has the lakehouse settings of a job spec."""
    assert list(LakehouseResource.model_fields) == list(LakehouseConfig.model_fields)
    expected = LakehouseConfig()
    given = LakehouseResource()
    assert {name: getattr(given, name) for name in LakehouseConfig.model_fields} == expected.model_dump()
    dg.validate_run_config(
        defs.resolve_job_def("upkeep_job"),
        {
            "resources": {
                "lakehouse": {"config": {"type": "rest", "uri": "http://catalog", "properties": {"token": "t"}}}
            }
        },
    )


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
