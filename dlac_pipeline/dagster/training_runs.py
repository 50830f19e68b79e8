"""Dagster runs that train: recognition, their job specs, and the queue that lets a training run have one trainer at a time.

A Dagster run trains what it plans to materialize: assets `models/<run>` of a `TrainingRun` component, or the asset
`model_checkpoint`, whose job spec is in the configuration of the Dagster run.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import dagster as dg
from dagster import QueuedRunCoordinator, SubmitRunContext

from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec, home_folder, parse_recorded

SNAPSHOT, PLAN, MODEL = dg.AssetKey("pinned_snapshot"), dg.AssetKey("work_plan"), dg.AssetKey("model_checkpoint")
"""Keys of the assets of a training run. `build_model_checkpoint` makes the one that is trained."""
TRAIN_JOB, RECOVER_JOB = "train_job", "recover_job"
"""Names of the two jobs of a project that train `model_checkpoint`."""
RUNS_JOB = "training_runs_job"
"""Name of the job on all training runs that are assets. Sensors and schedules launch a selection of it."""
MATERIALIZE = "__ASSET_JOB"
"""Dagster's name of the job that *Materialize* in the UI launches."""
TRAINING_JOBS = (TRAIN_JOB, RECOVER_JOB, MATERIALIZE)
TrainingJob = Any
"""A job as `dg.define_asset_job` returns it: its class has no public name."""
MONITORED = [dg.define_asset_job(name) for name in (*TRAINING_JOBS, RUNS_JOB)]
"""The jobs whose runs may train, for sensors on the ends of runs. Dagster uses only their names."""
NOT_RETRIED = {"dagster/max_retries": "0"}
"""Recovery has one owner: an instance whose `run_retries` are on starts runs with this tag no second time beside it."""
_STEP = MODEL.to_python_identifier()
_MODELS, _PLANS = "models", "plans"


def model_key(run: str) -> dg.AssetKey:
    """Return the key of the asset of a training run: `models/<run>`."""
    return dg.AssetKey([_MODELS, run])


def plan_key(run: str) -> dg.AssetKey:
    """Return the key of the asset of a training run's work plan: `plans/<run>`."""
    return dg.AssetKey([_PLANS, run])


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A training run that a Dagster run trains."""

    name: str
    key: dg.AssetKey
    """Asset of its model."""
    read_spec: Callable[[], JobSpec]
    """Returns its resolved job spec, with what the Dagster run overrides. Raises SpecInvalid."""
    job: str
    """Job that resumes it."""
    config: Mapping[str, Any]
    """Configuration of the Dagster run that is the same when it is resumed."""

    def request(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Return the job, selection and configuration of a `RunRequest` that resumes it, by these `LaunchChoices`."""
        step = self.key.to_python_identifier()
        given = self.config.get("ops", {}).get(step, {}).get("config", {})
        config = {**self.config, "ops": {step: {"config": {**given, **choices}}}}
        return {
            "job_name": self.job,
            "run_config": config,
            "asset_selection": [self.key] if self.job == RUNS_JOB else None,
        }


_defined: dict[dg.AssetKey, Callable[[Mapping[str, Any]], JobSpec]] = {}
"""Readers of the job specs of this code location's training runs, by the assets of their models.

Dagster gives sensors of other components only the names of assets.
"""


def define_training_run(key: dg.AssetKey, read_spec: Callable[[Mapping[str, Any]], JobSpec]) -> None:
    """Note how the job spec of a training run is read, given the settings that a Dagster run overrides."""
    _defined[key] = read_spec


def training_runs() -> dict[dg.AssetKey, Callable[[Mapping[str, Any]], JobSpec]]:
    """Return the readers of the job specs of this code location's training runs, by the assets of their models."""
    return dict(_defined)


def trained_by(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[Trained]:
    """Return the training runs of this code location that a Dagster run trains or has trained."""
    if trains(run):
        config = {"resources": {"job": {"config": {"spec": raw_spec_of(run.run_config)}}}}
        name, read_spec = training_run_of(run), partial(spec_of, run.run_config)
        return [Trained(name=name, key=MODEL, read_spec=read_spec, job=RECOVER_JOB, config=config)]
    return [_trained_asset(key, run) for key in planned_models(instance, run) if key in _defined]


def has_made(instance: dg.DagsterInstance, run: dg.DagsterRun, key: dg.AssetKey) -> bool:
    """Return True if a Dagster run has materialized an asset."""
    return key in _keys_of(instance, run, dg.DagsterEventType.ASSET_MATERIALIZATION)


def names_of_training(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[str]:
    """Return the names of the training runs that a Dagster run trains, also in a process without the code location.

    A name is empty if it is unknown here.
    """
    if trains(run):
        return [training_run_of(run)]
    return [key.path[1] for key in planned_models(instance, run)]


def planned_models(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.AssetKey]:
    """Return the assets `models/<run>` that a Dagster run was to materialize."""
    planned = _keys_of(instance, run, dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    return [key for key in planned if key.has_prefix([_MODELS]) and len(key.path) == len(model_key("").path)]


def _keys_of(instance: dg.DagsterInstance, run: dg.DagsterRun, kind: dg.DagsterEventType) -> list[dg.AssetKey]:
    events = [entry.dagster_event for entry in instance.all_logs(run.run_id, of_type=kind)]
    return [event.asset_key for event in events if event is not None and event.asset_key is not None]


def _trained_asset(key: dg.AssetKey, run: dg.DagsterRun) -> Trained:
    step = key.to_python_identifier()
    written: Any = run.run_config
    for name in ("ops", step, "config", "overrides"):
        written = written.get(name) if isinstance(written, Mapping) else None
    overrides = dict(written) if isinstance(written, Mapping) else {}
    return Trained(
        name=key.path[1],
        key=key,
        read_spec=lambda: _defined[key](overrides),
        job=RUNS_JOB,
        config={"ops": {step: {"config": {"overrides": overrides}}}},
    )


def trains(run: dg.DagsterRun) -> bool:
    """Return True if a run trains `model_checkpoint`: it is of one of these jobs, has a job spec, and was to materialize it.

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
        names = names_of_training(self._instance, run)
        if names:
            tags = {**NOT_RETRIED, **({RUN_TAG: names[0]} if len(names) == 1 and names[0] else {})}
            missing = {key: value for key, value in tags.items() if key not in run.tags}
            if missing:
                self._instance.add_run_tags(run.run_id, missing)
        return super().submit_run(context)
