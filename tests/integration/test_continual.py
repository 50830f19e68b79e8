"""When the schedule and the sensor on snapshots train a run again, and when they wait for a person."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from dlac_pipeline.dagster import Recovery, TrainingRun, training_runs
from dlac_pipeline.dagster.components.training_run import build_runs_of
from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, RUN_TAG
from dlac_pipeline.dagster.training_runs import model_key, plan_key
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.conftest import Arena, source_rows
from tests.dagster_runs import dagster_run

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code location of a test defines only the test's own training runs."""
    monkeypatch.setattr(training_runs, "defined_runs", {})


def following(arena: Arena, run: str, **changes: Any) -> JobSpec:
    """The spec of a run that follows its table, from a job file that defines its assets."""
    spec = arena.spec(run, follow="appends", world_size=1, **changes)
    path = arena.home / f"{run}.yml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True)))
    TrainingRun(spec_file=path.name).build_in(arena.home)
    return spec


def scheduled(instance: dg.DagsterInstance) -> Any:
    """What the schedule answers now."""
    repository = Recovery().build_defs().get_repository_def()
    context = dg.build_schedule_context(instance=instance, repository_def=repository)
    data = repository.get_schedule_def("continual_training_schedule").evaluate_tick(context)
    return data.run_requests or data.skip_message


def asked(instance: dg.DagsterInstance) -> Any:
    """What the sensor answers now."""
    repository = Recovery().build_defs().get_repository_def()
    context = dg.build_sensor_context(instance=instance, repository_def=repository)
    data = repository.get_sensor_def("new_snapshot_sensor").evaluate_tick(context)
    return [request.run_key for request in data.run_requests or []] or data.skip_message


def test_schedule_trains_new_rows_with_reason(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Not begun, trained to the end, appended to, under way, too little for a batch: one answer each, with its reason."""
    assert scheduled(instance) == "this code location defines no training run"
    arena.table(appends=(600,))
    spec = following(arena, "kept-going")
    [first] = scheduled(instance)
    assert first.tags[RUN_TAG] == "kept-going"
    assert first.asset_selection == [plan_key(spec.run), model_key(spec.run)]
    arena.train(spec)
    assert scheduled(instance) == "kept-going: nothing is new in src.t"
    arena.lakehouse.load("src.t").append(source_rows(2000, 3))
    [second] = scheduled(instance)
    assert "advanced from snapshot" in second.tags["dlac/why"]
    under_way = dagster_run(instance, spec, dg.DagsterRunStatus.STARTED)
    assert scheduled(instance) == f"kept-going is trained by Dagster run {under_way.run_id}"
    instance.delete_run(under_way.run_id)
    by_hand = dagster_run(instance, spec, dg.DagsterRunStatus.NOT_STARTED, tags={RUN_TAG: ""})
    assert scheduled(instance) == f"kept-going is trained by Dagster run {by_hand.run_id}"
    instance.delete_run(by_hand.run_id)
    dagster_run(instance, spec, dg.DagsterRunStatus.SUCCESS, tags={"dlac/due": second.tags["dlac/due"]})
    assert "less than a batch" in scheduled(instance)
    following(arena, "broken")
    (home / "broken.yml").write_text("run: 1")
    assert "is not a valid job spec" in scheduled(instance)
    (home / "broken.yml").write_text((home / "kept-going.yml").read_text())
    assert "found those of 'kept-going': restore the file" in scheduled(instance)


def test_schedule_names_wrong_job_files(arena: Arena, instance: dg.DagsterInstance) -> None:
    """A job file that is wrong when the definitions are loaded is named in each tick, until it is mended and loaded."""
    (arena.home / "jobs").mkdir()
    (arena.home / "jobs" / "wrong.toml").write_text("run = 1")
    build_runs_of(arena.home / "jobs")
    assert "wrong.toml defines no training run: " in scheduled(instance)
    (arena.home / "jobs" / "wrong.toml").unlink()
    build_runs_of(arena.home / "jobs")
    assert scheduled(instance) == "this code location defines no training run"


@pytest.mark.slow
def test_live_manual_launch_is_left_alone(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Nor does a Dagster run that was refused for its sake."""
    arena.table(appends=(600,))
    spec = following(arena, "by-hand")
    [asked_for] = scheduled(instance)
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    (Path(spec.checkpoint.local) / spec.run).mkdir(parents=True)
    with run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=False):
        assert scheduled(instance) == "by-hand: it has no checkpoint yet, but launch by hand (attempt 1) trains it"
        refused = {NO_RECOVERY_TAG: "RunBusy", "dlac/due": asked_for.tags["dlac/due"]}
        dagster_run(instance, spec, dg.DagsterRunStatus.FAILURE, tags=refused)
    [again] = scheduled(instance)
    assert again.tags["dlac/due"] == asked_for.tags["dlac/due"]


@pytest.mark.slow
def test_snapshot_sensor_asks_once_for_each(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Its run key names the snapshots: what a person cancelled is not asked for again until more is appended."""
    arena.table(appends=(600,))
    spec = following(arena, "sensed")
    [before] = asked(instance)
    arena.train(spec, until=8)
    assert asked(instance) == [before]  # Dagster has seen the key and launches nothing
    arena.train(spec)
    assert "nothing is new" in asked(instance)
    arena.lakehouse.load("src.t").append(source_rows(2000, 100))
    [after] = asked(instance)
    assert after != before


@pytest.mark.slow
def test_what_ended_for_good_waits_for_an_append(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Neither schedule nor sensor asks again, although the run had trained on; the Dagster run and the way out are named."""
    arena.table(appends=(600,))
    spec = following(arena, "ends")
    [request] = scheduled(instance)
    arena.train(spec, until=15)
    tags = {**request.tags, NO_RECOVERY_TAG: "ResumeMismatch"}
    ended = dagster_run(instance, spec, dg.DagsterRunStatus.FAILURE, tags=tags)
    said = scheduled(instance)
    assert said.startswith(f"ends: it was left at step 10, but Dagster run {ended.run_id} ")
    assert "ended with ResumeMismatch" in said
    assert "it continues when something is appended" in said
    assert asked(instance) == said
    arena.lakehouse.load("src.t").append(source_rows(2000, 100))
    [again] = scheduled(instance)
    assert again.tags["dlac/due"] != request.tags["dlac/due"]


@pytest.mark.slow
def test_a_mended_spec_or_script_is_tried_again(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """It is tried again without an append. A run with too few rows left for a batch resumes with a smaller batch."""
    arena.table(appends=(600,))
    script = home / "train.py"
    script.write_text("raise ValueError")
    spec = following(arena, "mended", script=str(script))
    [request] = scheduled(instance)
    before = asked(instance)
    dagster_run(instance, spec, dg.DagsterRunStatus.FAILURE, tags={**request.tags, NO_RECOVERY_TAG: "SpecInvalid"})
    assert "ended with SpecInvalid" in scheduled(instance)
    script.write_text("pass")
    [request] = scheduled(instance)
    assert asked(instance) != before
    dagster_run(instance, spec, dg.DagsterRunStatus.SUCCESS, tags=request.tags)
    assert "less than a batch" in scheduled(instance)
    spec = following(arena, "mended", script=str(script), batch_size=16)
    [smaller] = scheduled(instance)
    dagster_run(instance, spec, dg.DagsterRunStatus.CANCELED, tags=smaller.tags)
    assert "was cancelled by a person" in scheduled(instance)
    second_materialize = {NO_RECOVERY_TAG: "RunBusy"}
    dagster_run(instance, spec, dg.DagsterRunStatus.FAILURE, tags=second_materialize)
    assert "was cancelled by a person" in scheduled(instance)
    following(arena, "mended", script=str(script))
    assert "it has no checkpoint yet" in scheduled(instance)  # as it was before: that was trained
