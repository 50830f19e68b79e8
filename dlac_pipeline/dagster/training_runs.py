"""Training runs of a code location, and the Dagster runs that train them: they plan to materialize `models/<run>`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from dlac_pipeline.dagster.kept_specs import KeptSpecs
from dlac_pipeline.lakehouse.errors import NoSuchJobSpec, NoSuchRun
from dlac_pipeline.lakehouse.source_names import split_identifier
from dlac_pipeline.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

RUNS_JOB = "training_runs_job"
"""Name of the job on all training runs. Sensors and schedules launch a selection of it."""
TrainingJob = Any
"""A job as `dg.define_asset_job` returns it: its class has no public name."""
MONITORED = [dg.define_asset_job(name) for name in (RUNS_JOB, "__ASSET_JOB")]
"""Names of the jobs whose runs may train: DLAC's job, and the job that *Materialize* in the UI launches."""
NOT_RETRIED = {"dagster/max_retries": "0"}
"""Keeps Dagster's `run_retries` from restarting a run that the sensors recover."""
_MODELS, _PLANS = "models", "plans"


def table_key(table: str) -> dg.AssetKey:
    """Return the key of the asset of a source table: `namespace/table`, with "_" for characters that Dagster refuses."""
    external = split_identifier(table)
    parts = table.split(".") if external is None else external[1].split("/")
    parts = [each.encode("ascii", "xmlcharrefreplace").decode() for each in parts]  # letters as numbers
    return dg.AssetKey([part for each in parts if (part := re.sub(r"\W+", "_", each).strip("_"))])


def model_key(run: str) -> dg.AssetKey:
    """Return the key of the asset of a training run: `models/<run>`."""
    return dg.AssetKey([_MODELS, run])


def plan_key(run: str) -> dg.AssetKey:
    """Return the key of the asset of a training run's work plan: `plans/<run>`."""
    return dg.AssetKey([_PLANS, run])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRunDefinition:
    """Training run that a code location defines, with the settings that a launch overrides."""

    loaded: JobSpec
    """The resolved job spec when the definitions were loaded."""
    read_spec: Callable[[Mapping[str, Any]], JobSpec]
    """Returns the resolved job spec of now, given settings that override it. Raises SpecInvalid."""
    kept: KeptSpecs
    """The specs of launches from the same job file."""
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.loaded.run

    def job_spec(self) -> JobSpec:
        """Return the resolved spec for a new launch. Raises SpecInvalid."""
        return self.read_spec(self.overrides)

    def spec_to_recover(self) -> JobSpec:
        """Return the spec of the launch that a recovery resumes, whatever its job file has now. Raises SpecInvalid."""
        return self.kept.of_run(self.name) or self.job_spec()

    def trained_spec(self) -> JobSpec:
        """Return the spec of the last launch on this node, or the loaded spec."""
        from dlac_pipeline.supervise.claims import last_spec

        try:
            return last_spec(self.lakehouse(), self.name)
        except (NoSuchRun, NoSuchJobSpec):
            return self.loaded

    def lakehouse(self) -> "Lakehouse":
        """Return its open lakehouse."""
        from dlac_pipeline.lakehouse.iceberg.connect import connect

        return connect(self.loaded.lakehouse, tables=self.loaded.own_tables)

    def as_launched(self, run: dg.DagsterRun) -> "TrainingRunDefinition":
        """Return it with the overrides in the configuration of a Dagster run. A person may have written anything there."""
        written: Any = run.run_config
        for name in ("ops", self.step, "config", "overrides"):
            written = written.get(name) if isinstance(written, Mapping) else None
        return replace(self, overrides=dict(written) if isinstance(written, Mapping) else {})

    def recovery_request(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Return the job, selection and configuration of a `RunRequest` that resumes it with these `LaunchChoices`."""
        config = {"ops": {self.step: {"config": {"overrides": self.overrides, **choices}}}}
        return {"job_name": RUNS_JOB, "run_config": config, "asset_selection": [model_key(self.name)]}

    @property
    def step(self) -> str:
        """The step of its model in a Dagster run. Runs a-b and a_b have the same."""
        return model_key(self.name).to_python_identifier()


defined_runs: dict[str, TrainingRunDefinition] = {}
"""Training runs of this code location by name. Dagster gives sensors of other components only the names of assets."""
wrong_job_files: list[str] = []
"""Problems of the job files of this code location that define no training run."""


def names_of_training(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[str]:
    """Return the training runs that a Dagster run was to train, also in a process without the code location."""
    planned = _keys_of(instance, run, dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    return [key.path[1] for key in planned if key == model_key(key.path[-1])]


def has_made(instance: dg.DagsterInstance, run: dg.DagsterRun, key: dg.AssetKey) -> bool:
    """Return True if a Dagster run has materialized an asset."""
    return key in _keys_of(instance, run, dg.DagsterEventType.ASSET_MATERIALIZATION)


def _keys_of(instance: dg.DagsterInstance, run: dg.DagsterRun, kind: dg.DagsterEventType) -> list[dg.AssetKey]:
    events = [entry.dagster_event for entry in instance.all_logs(run.run_id, of_type=kind)]
    return [event.asset_key for event in events if event is not None and event.asset_key is not None]
