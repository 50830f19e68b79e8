"""The component of a training run: its assets, what they do on a real lakehouse, and what recovers them."""

from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.events import DagsterEvent, StepMaterializationData
from dagster._core.execution.plan.objects import StepFailureData

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster import IcebergTable, Recovery, TrainingRun
from dlac_pipeline.dagster import training_runs as training_runs_module
from dlac_pipeline.dagster.assets import training
from dlac_pipeline.dagster.components.training_run import build_runs_of
from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, RUN_TAG
from dlac_pipeline.dagster.sensors.recovery import RECOVERS_TAG, RecoveryDeferred
from dlac_pipeline.dagster.training_runs import RUNS_JOB, model_key, names_of_training, plan_key
from dlac_pipeline.lakehouse.errors import SpecInvalid
from tests.conftest import Arena
from tests.dagster_runs import fork_supervisors, recovery_requested

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
CHECKS = {"no_duplicate_rows", "no_missing_rows", "consumption_exact", "checkpoint_restorable"}


@pytest.fixture(autouse=True)
def forked_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Materialized assets start their supervisors as forked programs."""
    fork_supervisors(monkeypatch)


def job_file(arena: Arena, run: str, **changes: Any) -> str:
    """Write the job file of a run into the arena's folder, and return its name."""
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    spec = arena.spec(run, world_size=1, passes=1, **changes)
    (arena.home / f"{run}.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True)))
    return f"{run}.yaml"


def project(arena: Arena, *runs: str, **attributes: Any) -> dg.Definitions:
    """Return the definitions of a project with these runs, which can be recovered."""
    parts = [TrainingRun(spec_file=job_file(arena, run), **attributes).build_in(arena.home) for run in runs]
    return dg.Definitions.merge(*parts, Recovery().build_defs(), dg.Definitions(executor=dg.in_process_executor))


def begun(
    instance: dg.DagsterInstance, defs: dg.Definitions, *keys: dg.AssetKey, config: dict[str, Any] | None = None
) -> dg.DagsterRun:
    """Add a Dagster run that is to materialize assets, as *Materialize* in the UI makes it."""
    job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection=set(keys))
    return instance.create_run_for_job(
        job, run_config=config, status=dg.DagsterRunStatus.STARTED, asset_selection=frozenset(keys)
    )


def tick(instance: dg.DagsterInstance, defs: dg.Definitions, event: DagsterEvent, run_id: str) -> Any:
    """Return the answer of the recovery sensor to the end of a Dagster run."""
    run = instance.get_run_by_id(run_id)
    assert run is not None
    sensor = defs.get_repository_def().get_sensor_def("recovery_sensor")
    return sensor(dg.build_run_status_sensor_context(sensor.name, event, instance, run))


@pytest.mark.slow
def test_two_runs_are_two_assets(arena: Arena, instance: dg.DagsterInstance) -> None:
    """Each run has a plan, a model, checks and a history. The plan depends on the asset of the source table."""
    arena.table(appends=(64,))
    defs = project(arena, "one", "two")
    graph = defs.get_repository_def().asset_graph
    keys = {dg.AssetKey(["src", "t"]), *(make(run) for make in (plan_key, model_key) for run in ("one", "two"))}
    assert set(graph.get_all_asset_keys()) == keys
    assert graph.get(plan_key("one")).parent_keys == {dg.AssetKey(["src", "t"])}
    assert {key.name for key in graph.asset_check_keys if key.asset_key == model_key("two")} == CHECKS
    job = defs.resolve_implicit_global_asset_job_def()
    done = job.get_subset(asset_selection={plan_key("one"), model_key("one")}).execute_in_process(instance=instance)
    assert done.success
    passed = {check.check_name: check.passed for check in done.get_asset_check_evaluations()}
    assert passed == dict.fromkeys(CHECKS, True)
    made = instance.get_latest_materialization_event(model_key("one"))
    assert made is not None
    assert made.asset_materialization is not None
    assert made.asset_materialization.metadata["state"].value == "finished"
    assert instance.get_latest_materialization_event(model_key("two")) is None
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    assert run.tags[RUN_TAG] == "one"
    assert audit_run(arena.lakehouse, "one").exact


def test_dead_run_is_recovered_with_overrides(arena: Arena, instance: dg.DagsterInstance) -> None:
    """A Dagster run that dies is resumed by the job on training runs, as it was launched. Plans alone train nothing."""
    arena.table(appends=(320,))
    defs = project(arena, "dead", "other")
    overrides = {"checkpoint.every_steps": 5}
    config = {"ops": {"models__dead": {"config": {"overrides": overrides}}}}
    dead = begun(instance, defs, plan_key("dead"), model_key("dead"), config=config)
    plans = begun(instance, defs, plan_key("other"))
    assert [names_of_training(instance, run) for run in (dead, plans)] == [["dead"], []]
    instance.report_run_failed(dead, message="it died")
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    assert (request.job_name, request.asset_selection) == (RUNS_JOB, [model_key("dead")])
    assert request.tags[RECOVERS_TAG] == dead.run_id
    asked = request.run_config["ops"]["models__dead"]["config"]
    assert (asked["overrides"], asked["recovers"], asked["takeover"]) == (overrides, dead.run_id, True)
    job = defs.resolve_job_def(RUNS_JOB).get_subset(asset_selection={model_key("dead")})
    done = job.execute_in_process(instance=instance, run_config=request.run_config, tags=request.tags)
    assert done.success
    assert [row.step for row in arena.lineage("dead")][:2] == [5, 10]
    events = instance.all_logs(dead.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    links = [each.dagster_event.engine_event_data.metadata for each in events if each.dagster_event]
    assert [link["recovery"].value for link in links if "recovery" in link] == [done.run_id]
    assert audit_run(arena.lakehouse, "dead").exact


@pytest.mark.slow
def test_new_job_file_defers_recovery(arena: Arena, instance: dg.DagsterInstance) -> None:
    """A sensor whose code location was loaded before the job file was written waits until it is loaded again."""
    arena.table(appends=(64,))
    defs = project(arena, "new")
    dead = begun(instance, defs, model_key("new"))
    event = instance.report_run_failed(dead, message="it died")
    with arena.monkeypatch.context() as before:
        before.setattr(training_runs_module, "defined_runs", {})
        with pytest.raises(RecoveryDeferred, match=r".'new'. in this code location"):
            tick(instance, defs, event, dead.run_id)
    [request] = tick(instance, defs, event, dead.run_id)
    assert request.asset_selection == [model_key("new")]


def test_broken_job_file_is_not_recovered(arena: Arena, instance: dg.DagsterInstance) -> None:
    """A request that cannot be launched would be repeated at every tick."""
    arena.table(appends=(64,))
    dead = begun(instance, project(arena, "broken"), model_key("broken"))
    (arena.home / "broken.yaml").write_text("run: broken")
    instance.report_run_failed(dead, message="it died")
    skipped = recovery_requested(instance, dead)
    assert isinstance(skipped, dg.SkipReason)
    assert "cannot be launched again" in str(skipped.skip_message)


def test_folder_leaves_out_conflicting_files(arena: Arena) -> None:
    """A copied job file, or a run with the same name in Dagster as another, does not keep other runs from loading."""
    arena.monkeypatch.setattr(training_runs_module, "wrong_job_files", [])
    folder = arena.home / "jobs"
    folder.mkdir()
    for file, run in (("a", "a-b"), ("b", "a-b"), ("c", "a_b"), ("d", "other")):
        (arena.home / job_file(arena, run)).rename(folder / f"{file}.yml")
    delta = (folder / "d.yml").read_text().replace("run: other", "run: delta")
    (folder / "e.yml").write_text(delta.replace("table: src.t", "table: /data/x.y\n  format: delta"))
    defs = dg.Definitions.merge(build_runs_of(folder), dg.Definitions())
    keys = defs.get_repository_def().asset_graph.get_all_asset_keys()
    assert {key.path[1] for key in keys if key.path[0] == "models"} == {"a-b", "other", "delta"}
    assert dg.AssetKey(["data", "x_y"]) in keys


def test_innocent_run_is_recovered(arena: Arena, instance: dg.DagsterInstance) -> None:
    """Of three runs of a dead Dagster run one was trained, and one failed for good. The third is recovered."""
    arena.table(appends=(64,))
    names = ("trained", "guilty", "innocent")
    defs = project(arena, *names)
    dead = begun(instance, defs, *map(model_key, names))
    facts: dict[str, Any] = {
        "ASSET_MATERIALIZATION": StepMaterializationData(dg.AssetMaterialization(model_key("trained"))),
        "STEP_FAILURE": StepFailureData(None, None),  # type: ignore[no-untyped-call]  # a class without annotations
    }
    for (kind, data), name in zip(facts.items(), names, strict=False):
        event = DagsterEvent(kind, dead.job_name, step_key=f"models__{name}", event_specific_data=data)
        instance.report_dagster_event(event, dead.run_id)
    instance.add_run_tags(dead.run_id, {NO_RECOVERY_TAG: "ScriptFailed"})
    [request] = tick(instance, defs, instance.report_run_failed(dead, message="it died"), dead.run_id)
    assert request.asset_selection == [model_key("innocent")]


def test_wrong_attributes_are_named(arena: Arena) -> None:
    """The code location does not load. The error names the defect, or lists the jobs that exist."""
    with pytest.raises(SpecInvalid, match=r"among .*'verify_job'.*found .'verify'"):
        Recovery(maintenance={"verify": "@daily"}).build_defs()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"spec_file": "absent.yaml"},
            SpecInvalid,
            "cannot read the job spec .*: no such file; correct the path",
        ),
        ({"spec": {"run": "r"}}, SpecInvalid, "source"),
        ({}, ValueError, "one of spec_file and spec"),
        ({"spec_file": "a.toml", "spec": {}}, ValueError, "one of spec_file and spec"),
    ]
    for attributes, error, message in wrong:
        with pytest.raises(error, match=message):
            TrainingRun(**attributes).build_in(arena.home)


@pytest.mark.slow
def test_new_snapshot_is_observed_without_runs(arena: Arena, instance: dg.DagsterInstance) -> None:
    """The sensor of a source table launches no run, and reports a snapshot once. By it a training run is automated."""
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    table = arena.table()
    automated = TrainingRun(
        spec_file=job_file(arena, "automated"), automation_condition=dg.AutomationCondition.eager()
    ).build_in(arena.home)
    source = IcebergTable(table="src.t").build_defs(dg.ComponentTree.for_test().load_context)
    defs = dg.Definitions.merge(automated, source)
    repository = defs.get_repository_def()
    sensor = repository.get_sensor_def("src__t_observation")
    key, cursor, evaluated = dg.AssetKey(["src", "t"]), None, None
    requested = []
    for step in ("first", "same", "appended", "same"):
        if step == "appended":
            table.append(table.scan(limit=1).to_arrow())
        with dg.build_sensor_context(instance, cursor=cursor, repository_def=repository) as context:
            tick = sensor.evaluate_tick(context)
        assert not tick.run_requests
        for event in tick.asset_events:  # as the daemon reports them
            instance.report_runless_asset_event(event)
        cursor = tick.cursor or cursor
        evaluated = dg.evaluate_automation_conditions(
            defs, instance, cursor=None if evaluated is None else evaluated.cursor
        )
        requested.append((len(tick.asset_events), evaluated.get_num_requested(plan_key("automated"))))
    assert requested[1:] == [(0, 0), (1, 1), (0, 0)]
    seen = [each.asset_observation for each in instance.fetch_observations(key, 9).records]
    versions = [each.tags["dagster/data_version"] for each in seen if each is not None]
    assert versions == [str(snapshot.snapshot_id) for snapshot in table.refresh().snapshots()[:-3:-1]]
    assert instance.get_runs_count() == 0


@pytest.mark.slow
def test_edited_file_keeps_the_launch(arena: Arena, instance: dg.DagsterInstance) -> None:
    """A job file that is edited while a run trains changes neither its checks nor its recovery by a new process."""
    arena.monkeypatch.setattr(training_runs_module, "wrong_job_files", [])
    arena.table()
    defs = project(arena, "edited")
    path = arena.home / "edited.yaml"
    launched = path.read_text()
    dead = begun(instance, defs, model_key("edited"))
    job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection={model_key("edited")})

    def killed(*_: Any, **__: Any) -> Any:
        for text in ("run: edited\nsource:", launched.replace("run: edited", "run: second")):
            path.write_text(text)
            loaded = TrainingRun(spec_file=path.name).build_in(arena.home).get_repository_def().asset_graph
            assert model_key("edited") in loaded.get_all_asset_keys()
        path.write_text(launched.replace("run: edited", "run: second").replace("batch_size: 32", "batch_size: 64"))
        raise RuntimeError("the process of the Dagster run is killed")

    with arena.monkeypatch.context() as before:
        before.setattr(training, "supervise_run", killed)
        assert not job.execute_in_process(instance=instance, raise_on_error=False).success
    instance.report_run_failed(dead, message="it died")
    loaded = dg.Definitions.merge(
        TrainingRun(spec_file=path.name).build_in(arena.home),
        Recovery().build_defs(),
        dg.Definitions(executor=dg.in_process_executor),
    )
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    job = loaded.resolve_job_def(RUNS_JOB).get_subset(asset_selection={model_key("edited")})
    done = job.execute_in_process(instance=instance, run_config=request.run_config, tags=request.tags)
    assert done.success
    assert {check.passed for check in done.get_asset_check_evaluations()} == {True}
    assert [row.step for row in arena.lineage("edited")][-1] == -(-2000 // 32)
    keys = TrainingRun(spec_file=path.name).build_in(arena.home).get_repository_def().asset_graph.get_all_asset_keys()
    assert {key.path[1] for key in keys if key.path[0] == "models"} == {"second"}
