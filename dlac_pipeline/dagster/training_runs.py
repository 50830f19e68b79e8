"""Dagster runs that train: recognition, their job specs, and the queue that lets a training run have one trainer at a time."""

import os
from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster import QueuedRunCoordinator, SubmitRunContext

from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec, home_folder, parse_recorded

SNAPSHOT, PLAN, MODEL = dg.AssetKey("pinned_snapshot"), dg.AssetKey("work_plan"), dg.AssetKey("model_checkpoint")
"""Keys of the assets of a training run. `build_model_checkpoint` makes the one that is trained."""
TRAIN_JOB, RECOVER_JOB = "train_job", "recover_job"
"""Names of the two jobs of a project that train."""
MATERIALIZE = "__ASSET_JOB"
"""Dagster's name of the job that *Materialize* in the UI launches."""
TRAINING_JOBS = (TRAIN_JOB, RECOVER_JOB, MATERIALIZE)
TrainingJob = Any
"""A job as `dg.define_asset_job` returns it: its class has no public name."""
MONITORED = [dg.define_asset_job(name) for name in TRAINING_JOBS]
"""The jobs whose runs may train, for sensors on the ends of runs. Dagster uses only their names."""
NOT_RETRIED = {"dagster/max_retries": "0"}
"""Recovery has one owner: an instance whose `run_retries` are on starts runs with this tag no second time beside it."""
_STEP = MODEL.to_python_identifier()


def trains(run: dg.DagsterRun) -> bool:
    """Return True if a run trains: it is of one of these jobs, has a job spec, and was to materialize the model.

    Runs of checks alone, of other assets, and re-executions of steps without the model do not train.
    """
    if run.job_name not in TRAINING_JOBS or raw_spec_of(run.run_config) is None:
        return False
    if run.step_keys_to_execute is not None and _STEP not in run.step_keys_to_execute:
        return False
    return run.asset_check_selection is None if run.asset_selection is None else MODEL in run.asset_selection


def is_of(run: dg.DagsterRun, location: str | None) -> bool:
    """Return True if a run belongs to the code location of this name. Others may have assets and jobs of the same names."""
    origin = run.remote_job_origin
    name = None if origin is None else origin.repository_origin.code_location_origin.location_name
    return name == location


def spec_of(run_config: Mapping[str, Any]) -> JobSpec:
    """Return the job spec in the configuration of a Dagster run. `{env: NAME}` stands for a variable, as in Dagster.

    Raises:
        SpecInvalid: it does not exist, is not valid, or names a variable that this process does not have.
    """
    raw = raw_spec_of(run_config)
    if raw is None:
        raise SpecInvalid("expected a job spec in the run's configuration, found none")
    return parse_recorded(_with_environment(raw), origin="the run's configuration").resolved(home_folder())


def raw_spec_of(run_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the job spec in the configuration of a Dagster run, as it is written, or None.

    It is not validated: a key without a value is None in YAML, and a person may have written anything.
    """
    found: Any = run_config
    for name in ("resources", "job", "config", "spec"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def training_run_of(run: dg.DagsterRun) -> str:
    """Return the name of the training run in a Dagster run's configuration. Empty: unknown here."""
    named: Any = (raw_spec_of(run.run_config) or {}).get("run")
    try:
        named = _with_environment(named)
    except SpecInvalid:
        return ""
    return named if isinstance(named, str) else ""


def _with_environment(written: Any) -> Any:
    """Return the configuration with the values of the environment variables that it names."""
    if isinstance(written, Mapping):
        if set(written) == {"env"} and isinstance(name := written["env"], str):
            if name not in os.environ:
                raise SpecInvalid(f"expected the environment variable {name!r}, found that it is not set")
            return os.environ[name]
        return {key: _with_environment(value) for key, value in written.items()}
    return [_with_environment(value) for value in written] if isinstance(written, list) else written


class TrainingRunCoordinator(QueuedRunCoordinator):
    """Run coordinator that tags a training Dagster run with the name of its training run before it is queued.

    By that tag the queue's `tag_concurrency_limits` hold back a second trainer of the same training run. It is a courtesy, as
    the run's lock is: safety depends on the fence. A launch by *Materialize* in the UI has no job's tags, so the coordinator
    also sets that Dagster retries none of these runs.
    """

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        """Tag and enqueue."""
        run = context.dagster_run
        if trains(run):
            name = training_run_of(run)
            tags = {**NOT_RETRIED, **({RUN_TAG: name} if name else {})}
            missing = {key: value for key, value in tags.items() if key not in run.tags}
            if missing:
                self._instance.add_run_tags(run.run_id, missing)
        return super().submit_run(context)
