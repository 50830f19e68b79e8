"""Components of a training run, whose plan and model are assets, and of a source table that other programs write."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG
from dagster.components.resolved.model import Injected
from pydantic import ConfigDict, Field, model_validator

from dlac_pipeline.dagster import training_runs as runs
from dlac_pipeline.dagster.assets.checks import build_checks
from dlac_pipeline.dagster.assets.training import POOL, build_model, build_plan
from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.dagster.kept_specs import KeptSpecs
from dlac_pipeline.dagster.resources import HEARTBEAT, heartbeat_resource
from dlac_pipeline.lakehouse.config import LakehouseConfig, home_folder
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.spec.job_spec import JobSpec, read_spec, spec_of_file

_log = logging.getLogger(__name__)
_KIND = "dlac"
"""Kind of the assets of training runs, by which their job selects them."""
_STAGE = "dlac/stage"
FOLDER = "jobs"
"""Folder in the home folder, with one job file for each training run of this repository's own project."""
_SUFFIXES = (".toml", ".yaml", ".yml")


class TrainingRunScaffolder(dg.Scaffolder):
    """Makes the files of a training run for `dg scaffold defs`: defs.yaml and a job file to complete."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        """Write the files."""
        from dlac_pipeline.extensions.registration.new_project import scaffold_job

        dg.scaffold_component(request, {"spec_file": "job.toml"})
        (request.target_path / "job.toml").write_text(scaffold_job(request.target_path.name))


@dg.scaffold_with(TrainingRunScaffolder)
class TrainingRun(dg.Component, dg.Model, dg.Resolvable):
    """A training run: the assets `plans/<run>` and `models/<run>` with checks, from its job spec.

    The plan depends on the assets of the source tables, and the model on the plan. A `Recovery` component of the same code
    location recovers the run.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    spec_file: str | None = Field(default=None, description="Job file, from the folder of defs.yaml.")
    spec: dict[str, Any] | None = Field(default=None, description="Settings of the job spec, in place of a file.")
    source_assets: Mapping[str, str] = Field(
        default={}, description="Asset of a source table, by its name. Unset: the asset namespace/table."
    )
    group_name: str = Field(default="training", description="Group of the assets.")
    owners: Sequence[str] = Field(default=(), description="Owners of the assets.")
    kinds: Sequence[str] = Field(default=("pytorch",), description="Kinds of the model, beside dlac.")
    tags: Mapping[str, str] = Field(default={}, description="Tags of the assets.")
    pool: str = Field(default=POOL, description="Pool whose limit is the number of trainers at one time.")
    automation_condition: Injected[dg.AutomationCondition[Any]] | None = Field(
        default=None,
        description="When to plan and train, such as '{{ automation_condition.eager() }}'. Unset: by hand.",
    )
    rehearsal: bool = Field(default=False, description="Rehearse the run after each training. That costs a launch.")

    @model_validator(mode="after")
    def _has_one_spec(self) -> "TrainingRun":
        if (self.spec_file is None) == (self.spec is None):
            raise ValueError("expected one of spec_file and spec, found both or none")
        return self

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the assets, checks and the automation of the run."""
        return self.build_in(context.path)

    def build_in(self, folder: Path) -> dg.Definitions:
        """Return the definitions of the run, whose files are relative to `folder`. Raise `SpecInvalid` if a setting is wrong.

        A job file that became wrong while runs of it train is logged: their recovery needs their assets.
        """
        own, unfinished = [], self.unfinished_runs(folder)
        try:
            own = [self.run_of_file(folder)]
        except SpecInvalid as err:
            if not unfinished:
                raise
            _report_problem(f"only unfinished runs of {str(folder / str(self.spec_file))!r} are defined: {err}")
        found = {run.name: run for run in (*unfinished, *own)}
        return dg.Definitions.merge(*map(self.define, found.values()))

    def run_of_file(self, folder: Path) -> runs.TrainingRunDefinition:
        """Return the run that the job spec names. Raise `SpecInvalid` if a setting is wrong."""
        return self._definition(folder, self._read(folder, {}).resolved(home_folder()))

    def unfinished_runs(self, folder: Path) -> list[runs.TrainingRunDefinition]:
        """Return the runs that were launched from the job file and have not ended, whatever the file has now."""
        kept = KeptSpecs(folder / self.spec_file).all() if self.spec_file else {}
        return [self._definition(folder, spec) for spec in kept.values()]

    def _definition(self, folder: Path, spec: JobSpec) -> runs.TrainingRunDefinition:
        kept = KeptSpecs(folder / (self.spec_file or "defs.yaml"))
        return runs.TrainingRunDefinition(loaded=spec, read_spec=partial(self._read_now, folder, spec), kept=kept)

    def define(self, run: runs.TrainingRunDefinition) -> dg.Definitions:
        """Return the assets, checks and automation of a run."""
        runs.defined_runs[run.name] = run
        spec = run.loaded
        named, tables = self.source_assets, dict.fromkeys(source.table for source in spec.sources)
        sources = [dg.AssetKey.from_user_string(named[one]) if one in named else runs.table_key(one) for one in tables]
        about = {"description": _describe(spec, self.spec_file), **self._attributes("train")}
        model = build_model(run, pool=self.pool, kinds={_KIND, *self.kinds}, **about)
        return dg.Definitions(
            assets=[build_plan(run, deps=sources, kinds={"iceberg"}, **self._attributes("plan")), model],
            asset_checks=build_checks(run, with_rehearsal=self.rehearsal),
            sensors=list(self._automation(run.name)),
            resources={HEARTBEAT: heartbeat_resource},
        )

    def _read_now(self, folder: Path, loaded: JobSpec, overrides: Mapping[str, Any]) -> JobSpec:
        """Return the spec that the file has now. Raise `SpecInvalid` if it names another run than the loaded spec."""
        now = self._read(folder, overrides).resolved(home_folder())
        if (now.run, now.lakehouse) == (loaded.run, loaded.lakehouse):
            return now
        if overrides:
            raise SpecInvalid(
                f"expected overrides of other settings than run and lakehouse, found {sorted(overrides)}: the asset, its "
                "checks and its recovery are those of the job file's run"
            )
        raise SpecInvalid(
            f"expected the job file of run {loaded.run!r} with its lakehouse, found those of {now.run!r}: restore the file, "
            "write a second one with `dlac new-run`, or reload the definitions"
        )

    def _attributes(self, stage: str) -> dict[str, Any]:
        return {
            "group_name": self.group_name,
            "owners": list(self.owners) or None,
            "automation_condition": self.automation_condition,
            "tags": {**self.tags, _STAGE: stage},
        }

    def _read(self, folder: Path, overrides: Mapping[str, Any]) -> JobSpec:
        if self.spec_file is not None:
            return read_spec(folder / self.spec_file, overrides=overrides)
        raw = copy.deepcopy(self.spec or {})
        return spec_of_file(raw, folder=folder, origin=f"the spec in {folder}", overrides=overrides)

    def _automation(self, run: str) -> Iterator[dg.AutomationConditionSensorDefinition]:
        """Yield the sensor that evaluates the condition: one for each run, so that no Dagster run trains two of them."""
        if self.automation_condition is not None:
            yield dg.AutomationConditionSensorDefinition(
                name=f"{runs.model_key(run).to_python_identifier()}_automation",
                target=dg.AssetSelection.assets(runs.plan_key(run), runs.model_key(run)),
                run_tags={**runs.NOT_RETRIED, RUN_TAG: run},
                description=f"Requests training run {run} by its automation condition. Off until you turn it on.",
            )


class IcebergTable(dg.Component, dg.Model, dg.Resolvable):
    """A source table that other programs write, as an observed asset. Its data version is the current snapshot."""

    table: str = Field(description="Name of the table, as namespace.table.")
    lakehouse: Mapping[str, Any] = Field(default={}, description="Settings of the lakehouse, as in a job spec.")
    group_name: str = Field(default="sources", description="Group of the asset.")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the asset, and the sensor that looks at its snapshot each minute."""
        key = runs.table_key(self.table)

        def observe() -> dg.DataVersion:
            return dg.DataVersion(self._snapshot())

        asset = dg.observable_source_asset(
            key=key,
            group_name=self.group_name,
            description=f"One row per row of the Iceberg table {self.table}. Its data version is the snapshot.",
        )(observe)

        @dg.sensor(
            name=f"{key.to_python_identifier()}_observation",
            minimum_interval_seconds=60,
            default_status=dg.DefaultSensorStatus.RUNNING,
            description=f"Looks at the snapshot of {self.table} each minute. A new one is an observation, without a run.",
        )
        def look(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
            snapshot = self._snapshot()
            if snapshot == context.cursor:
                return dg.SkipReason(f"nothing is new in {self.table}: its snapshot is {snapshot}")
            seen = dg.AssetObservation(key, tags={DATA_VERSION_TAG: snapshot})
            return dg.SensorResult(asset_events=[seen], cursor=snapshot)

        return dg.Definitions(assets=[asset], sensors=[look])

    def _snapshot(self) -> str:
        from dlac_pipeline.lakehouse.iceberg.connect import connect

        config = LakehouseConfig.model_validate(self.lakehouse).at_home(home_folder())
        lakehouse = connect(config, tables=(self.table,))
        current = lakehouse.load(self.table).current_snapshot()
        return "empty" if current is None else str(current.snapshot_id)


def build_runs_of(folder: Path, **attributes: Any) -> dg.Definitions:
    """Return the definitions of a training run for each job file of a folder. `attributes` are attributes of `TrainingRun`.

    A file that is wrong is logged and left out, because all further runs must still be recovered.
    """
    found: dict[str, dg.Definitions] = {}
    runs.wrong_job_files.clear()
    files = folder.iterdir() if folder.is_dir() else ()
    names = sorted(path.name for path in files if path.suffix in _SUFFIXES)
    components = [TrainingRun(spec_file=name, **attributes) for name in names]
    for component in components:
        try:
            run = component.run_of_file(folder)
            if run.step in found:
                raise SpecInvalid(
                    f"expected a name that Dagster can tell from those of others, found {run.name!r} again"
                )
            found[run.step] = component.define(run)
        except (SpecInvalid, dg.DagsterInvalidDefinitionError) as err:
            _report_problem(f"{folder / str(component.spec_file)} defines no training run: {err}")
    for component in components:
        for run in component.unfinished_runs(folder):
            if run.step not in found:
                found[run.step] = component.define(run)
    return dg.Definitions.merge(*found.values())


def _report_problem(problem: str) -> None:
    runs.wrong_job_files.append(problem)
    _log.error("%s", problem)


def build_runs_job() -> Any:
    """Return the job on all training runs, for sensors and schedules that select a run."""
    models = dg.AssetSelection.kind(_KIND)
    return dg.define_asset_job(
        runs.RUNS_JOB,
        selection=models | models.upstream(depth=1) & dg.AssetSelection.tag(_STAGE, "plan"),
        description="All training runs. Sensors launch one of them. By hand, use Materialize of its asset.",
        tags=runs.NOT_RETRIED,
        executor_def=dg.in_process_executor,
    )


def _describe(spec: JobSpec, file: str | None) -> str:
    tables = ", ".join(source.table for source in spec.sources)
    settings = mask_secrets(spec.model_dump_json(indent=2, exclude_defaults=True))
    return (
        f"One model of training run `{spec.run}` on {tables}. Each committed checkpoint names exactly the rows that it has "
        f"consumed.\n\nJob spec ({file or 'in defs.yaml'}):\n\n```json\n{settings}\n```"
    )
