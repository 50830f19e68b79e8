"""The Dagster definitions: names, descriptions, and one definition of the job spec."""

from __future__ import annotations

from typing import Any, cast

import dagster as dg
import pytest
import yaml
from dagster import SubmitRunContext
from dagster._core.events import RunFailureReason
from dagster._core.execution.retries import auto_reexecution_should_retry_run

from dlac_pipeline.dagster.resources import JobSpecConfig, LakehouseResource
from dlac_pipeline.dagster.training_runs import TrainingRunCoordinator, raw_spec_of
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.spec.job_spec import JobSpec
from examples.demo.local_dagster import SETTINGS
from jobs.definitions import defs

ON = ("recovery_sensor", "preemption_sensor", "lost_run_sensor")
OFF_SENSORS = (
    "new_snapshot_sensor",
    "runs_snapshot_sensor",
    "registration_sensor",
    "dlac_failure_alerts",
    "dlac_success_alerts",
    "dlac_check_alerts",
    "dlac_failed_run_check_alerts",
)
SCHEDULES = {
    "continual_training_schedule": "train_job",
    "continual_runs_schedule": "training_runs_job",
    "ledger_maintenance_schedule": "upkeep_job",
    "verify_schedule": "verify_job",
    "rehearse_schedule": "rehearse_job",
}
SPEC: dict[str, Any] = {
    "run": "r",
    "source": {"table": "src.t", "columns": ["x"]},
    "order": {"batch_size": 32},
    "launch": {"script": "/train.py"},
}
CONFIG = {"resources": {"job": {"config": {"spec": SPEC}}}}
"""Of a Dagster run that trains."""


def test_code_location_has_exact_definitions() -> None:
    """Renaming or dropping a definition breaks schedules and links of users, so it must be deliberate."""
    repository = defs.get_repository_def()
    assets = {key.to_user_string() for key in repository.asset_graph.get_all_asset_keys()}
    assert assets == {"corpus", "tokens", "pinned_snapshot", "work_plan", "model_checkpoint"}
    checks = {key.name for key in repository.asset_graph.asset_check_keys}
    assert checks == {
        "no_duplicate_rows",
        "no_missing_rows",
        "consumption_exact",
        "checkpoint_restorable",
        "rehearsal_identical",
    }
    jobs = {"ingest_job", "train_job", "recover_job", "upkeep_job", "verify_job", "rehearse_job", "register_job"}
    jobs |= {"training_runs_job"}
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


def test_launchpad_shows_every_spec_field() -> None:
    """The Dagster configuration is generated from the pydantic model, with the same fields and descriptions in every section."""
    pairs = [(JobSpec, JobSpecConfig)]
    seen = 0
    for model, config in pairs:
        assert list(config.model_fields) == list(model.model_fields)
        for name, field in model.model_fields.items():
            shown = config.model_fields[name]
            assert shown.description == field.description
            assert field.description, f"{model.__name__}.{name} has no description"
            assert shown.is_required() == field.is_required()
            nested = shown.annotation
            if isinstance(nested, type) and issubclass(nested, dg.Config):
                assert isinstance(field.annotation, type)
                pairs.append((field.annotation, nested))
            seen += 1
    assert seen > len(JobSpec.model_fields)


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
    assert graph.get(dg.AssetKey("model_checkpoint")).pools == {"trainers"}
    for key in graph.get_all_asset_keys():
        assert graph.get(key).owners, key
        assert graph.get(key).kinds, key


def test_configuration_without_spec_has_none() -> None:
    """The queue tags every launched run. Missing, empty or mistyped keys in the YAML mean that the run has no spec."""
    spec = {"run": "r"}
    assert raw_spec_of({"resources": {"job": {"config": {"spec": spec}}}}) == spec
    assert raw_spec_of({}) is None
    others: list[object] = [None, [], {"job": None}, {"job": {"config": None}}, {"job": {"config": {"spec": "r"}}}]
    for below in others:
        assert raw_spec_of({"resources": below}) is None


def test_training_job_has_two_checks() -> None:
    """A rehearsal costs a launch, so it has its own job."""
    for name, before in (("train_job", {"pinned_snapshot", "work_plan"}), ("recover_job", set())):
        steps = {node.name for node in defs.resolve_job_def(name).nodes}
        assert steps == {*before, "model_checkpoint", "consumption_audit", "model_checkpoint_checkpoint_restorable"}


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


def test_launchpad_refuses_unknown_choice() -> None:
    """A misspelt choice is reported before anything is queued, in every section. The choices are listed for completion."""
    job = defs.resolve_job_def("train_job")

    def configured(mixture: dict[str, str], launch: dict[str, str]) -> None:
        spec = {**SPEC, "mixture": [{**SPEC["source"], **mixture}], "launch": {**SPEC["launch"], **launch}}
        dg.validate_run_config(job, {"resources": {"job": {"config": {"spec": spec}}}})

    configured({"follow": "appends"}, {"on": "slurm", "start": "spawn"})
    for mixture, launch in (({"follow": "apends"}, {}), ({}, {"on": "slrum"}), ({}, {"start": "frok"})):
        with pytest.raises(dg.DagsterInvalidConfigError, match="not in enum type"):
            configured(mixture, launch)


@pytest.mark.parametrize("of_steps", [True, False])
def test_dagster_retries_no_training(of_steps: bool) -> None:
    """Dagster's own retries stay off for training, even if they are enabled for everything. Only the sensor recovers runs."""
    retries = {"enabled": True, "max_retries": 3, "retry_on_asset_or_op_failure": of_steps}
    with dg.DagsterInstance.ephemeral(settings={"run_retries": retries}) as instance:

        def retried(name: str) -> bool:
            job, config = defs.resolve_job_def(name), {} if name == "verify_job" else CONFIG
            state, tags = dg.DagsterRunStatus.FAILURE, job.run_tags
            run = instance.create_run_for_job(job, run_config=config, status=state, tags=tags)
            return bool(auto_reexecution_should_retry_run(instance, run, RunFailureReason.RUN_EXCEPTION))

        assert retried("verify_job")
        assert not retried("train_job")
        assert not retried("recover_job")


def test_queue_has_no_limit_and_tags() -> None:
    """Recoveries wait for no backlog. A launch by *Materialize* in the UI has the same tags as a launch by a DLAC job."""
    config = yaml.safe_load(SETTINGS.read_text())["run_coordinator"]["config"]
    with dg.DagsterInstance.ephemeral() as instance:
        coordinator = TrainingRunCoordinator(**config)
        coordinator.register_instance(instance)
        assert coordinator.get_run_queue_config().max_concurrent_runs == -1

        def tags(asset: str) -> dict[str, str]:
            job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection={dg.AssetKey(asset)})
            run = instance.create_run_for_job(
                job,
                run_config=CONFIG,
                status=dg.DagsterRunStatus.STARTED,  # nothing is enqueued for an absent code location
                asset_selection=frozenset({dg.AssetKey(asset)}),
            )
            found = coordinator.submit_run(SubmitRunContext(run, cast("Any", None))).tags
            return {name: found[name] for name in ("dlac/run", "dagster/max_retries") if name in found}

        assert tags("model_checkpoint") == {"dlac/run": "r", "dagster/max_retries": "0"}
        assert tags("work_plan") == {}
