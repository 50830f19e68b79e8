"""What the sensors of global recovery make of Dagster runs that have ended, on a real lakehouse and a real instance."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from assets.training import model_checkpoint
from dagster._core.test_utils import in_process_test_workspace
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster_shared.record import copy
from jobs.train import recover_job, recovery_sensor, train_job

from dlac_pipeline.dagster.assets.training import POOL
from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, OUTAGE_TAG, PREEMPTED_TAG, RUN_TAG, own_value, run_tag
from dlac_pipeline.dagster.heartbeat import Heartbeat
from dlac_pipeline.dagster.sensors.continual import run_config_of
from dlac_pipeline.dagster.sensors.lost_runs import lost_run_sensor
from dlac_pipeline.dagster.sensors.recovery import RECOVERS_TAG
from dlac_pipeline.dagster.training_runs import (
    MATERIALIZE,
    MODEL,
    TRAINING_JOBS,
    TrainingRunCoordinator,
    spec_of,
    training_run_of,
    trains,
)
from dlac_pipeline.lakehouse.errors import SteppedAside
from dlac_pipeline.lakehouse.ledger.commits import check_current, claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from jobs.definitions import defs
from tests.conftest import Arena
from tests.dagster_runs import recovery_requested

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
DIED = dg.DagsterRunStatus.FAILURE
CHECK = dg.AssetCheckKey(MODEL, "checkpoint_restorable")


def left(arena: Arena, run: str) -> Any:
    """The spec of a run that was left behind step 10."""
    arena.table()
    spec = arena.spec(run, world_size=1)
    arena.train(spec, until=15)
    return spec


def test_only_training_materializations_are_recovered(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """*Materialize* in the UI launches a job of Dagster's own; other assets, and checks alone, train nothing."""
    assert model_checkpoint.key == MODEL
    config = run_config_of(left(arena, "materialized"))
    cursor, answers = look(instance, None)
    assert answers == []
    runs = [
        materialized(instance, config, {MODEL}),
        materialized(instance, config, {dg.AssetKey("work_plan")}),
        materialized(instance, config, set(), {CHECK}),
    ]
    for run in runs:
        instance.report_run_failed(run, message="it died")
    assert [trains(run) for run in runs] == [True, False, False]
    whole, own = runs[0], copy(runs[0], job_name="a_job_of_ones_own")
    assert not any(map(trains, (own, copy(whole, step_keys_to_execute=["consumption_audit"]))))
    assert (train_job.name, recover_job.name, MATERIALIZE) == TRAINING_JOBS
    recovered = []
    for _ in runs:
        cursor, answers = look(instance, cursor)
        recovered += answers
    [request] = recovered
    assert request.tags[RECOVERS_TAG] == runs[0].run_id
    assert set(request.run_config["resources"]) == {"job"}


def materialized(
    instance: dg.DagsterInstance,
    config: dict[str, Any],
    assets: set[dg.AssetKey],
    checks: set[dg.AssetCheckKey] | None = None,
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED,
    **origin: Any,
) -> dg.DagsterRun:
    """A run as the UI's *Materialize* and *Execute checks* launch it: of Dagster's own job, with what was selected."""
    job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection=assets, asset_check_selection=checks)
    made = instance.create_run_for_job(job, run_config=config, status=status, **origin)
    instance.delete_run(made.run_id)
    selected = {"asset_selection": frozenset(assets), "asset_check_selection": checks and frozenset(checks)}
    return instance.run_storage.add_run(copy(made, **selected))


def look(instance: dg.DagsterInstance, cursor: str | None) -> tuple[str | None, list[dg.RunRequest]]:
    """One tick of the recovery sensor: its new cursor, and what it requested."""
    context = dg.build_sensor_context(instance=instance, cursor=cursor, repository_def=defs.get_repository_def())
    data = recovery_sensor.evaluate_tick(context)
    return context.cursor or data.cursor, list(data.run_requests or [])


@pytest.mark.soak
def test_a_job_spec_may_name_environment_variables(
    arena: Arena, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster resolves them for the run, and so does the sensor; what could not be launched is not requested for ever."""
    spec = left(arena, "secret")
    config = run_config_of(spec)
    raw = config["resources"]["job"]["config"]["spec"]
    raw["lakehouse"]["uri"] = {"env": "TEST_CATALOG_URI"}
    monkeypatch.setenv("TEST_CATALOG_URI", spec.lakehouse.uri)
    dead = instance.create_run_for_job(defs.resolve_job_def("train_job"), run_config=config, status=DIED)
    monkeypatch.delenv("TEST_CATALOG_URI")
    blind = recovery_requested(instance, dead)
    assert isinstance(blind, dg.SkipReason)
    assert "'TEST_CATALOG_URI', found that it is not set" in str(blind.skip_message)
    monkeypatch.setenv("TEST_CATALOG_URI", spec.lakehouse.uri)
    assert spec_of(config).lakehouse.uri == spec.lakehouse.uri
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    dg.validate_run_config(defs.resolve_job_def("recover_job"), request.run_config)
    launch = request.run_config["ops"]["model_checkpoint"]["config"]
    assert (launch["takeover"], launch["replaces"]) == (True, 1)
    written = request.run_config["resources"]["job"]["config"]["spec"]
    assert written["lakehouse"]["uri"] == {"env": "TEST_CATALOG_URI"}, "a password is not written down"
    raw["run"] = {"env": "TEST_CATALOG_URI"}
    assert training_run_of(dead) == spec.lakehouse.uri


def test_failed_decision_requests_recovery(
    arena: Arena, home: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster does not ask again about a run: its own storage may be locked just then."""
    spec = left(arena, "unlucky")
    dead = instance.create_run_for_job(
        defs.resolve_job_def("train_job"), run_config=run_config_of(spec), status=DIED, tags={RUN_TAG: spec.run}
    )

    def locked(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr("dlac_pipeline.lakehouse.ledger.ledger.Ledger.rows", locked)
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    assert request.run_config["ops"]["model_checkpoint"]["config"]["takeover"] is False


@pytest.mark.soak
def test_attempt_begun_during_decision_stays(
    arena: Arena, home: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's `dlac recover` answers the same death: the recovery replaces what it saw dead, and so steps aside."""
    spec = left(arena, "answered-twice")
    dead = instance.create_run_for_job(
        defs.resolve_job_def("train_job"), run_config=run_config_of(spec), status=DIED, tags={RUN_TAG: spec.run}
    )
    ledger = Ledger(arena.lakehouse)
    [attempt] = [row.attempt for row in ledger.rows(spec.run, kinds=(ClaimRow,))]

    original = Ledger.rows

    def read(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        monkeypatch.setattr(Ledger, "rows", original)
        claim(ledger, spec.run, nonce="by-hand", replaces=attempt, detail={"launched_by": ""})
        return found

    monkeypatch.setattr(Ledger, "rows", read)
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    assert ledger.state(spec.run).fence.attempt == attempt + 1
    launch = request.run_config["ops"]["model_checkpoint"]["config"]
    assert (launch["takeover"], launch["replaces"]) == (True, attempt)
    with pytest.raises(SteppedAside):
        check_current(ledger.state(spec.run), launch["replaces"])


@pytest.mark.soak
def test_a_second_outage_begins_anew(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """A recovery that was requested in an outage two days ago, and has committed since, died of another one."""
    spec = left(arena, "twice-away")
    long_ago = str(time.time() - 172_800)
    tags = {
        OUTAGE_TAG: "CatalogUnreachable",
        "dlac/outage_since": long_ago,
        "dlac/head": "what it was then",
        "dlac/recoveries_in_a_row": "1",
    }
    dead = instance.create_run_for_job(
        defs.resolve_job_def("recover_job"),
        run_config=run_config_of(spec),
        status=DIED,
        tags={RUN_TAG: spec.run, **tags},
    )
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    assert float(request.tags["dlac/outage_since"]) > float(long_ago) + 172_000
    assert request.tags["dlac/recoveries_in_a_row"] == "1"


@pytest.mark.soak
def test_re_executed_run_is_judged_alone(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Dagster gives it the tags of the run before, which somebody has mended; what it ended with itself counts."""
    spec = left(arena, "mended")
    inherited = {
        RUN_TAG: spec.run,
        NO_RECOVERY_TAG: "SpecInvalid",
        PREEMPTED_TAG: "SIGTERM",
        "dlac/recoveries_in_a_row": "9",
        "dlac/head": "None",
    }
    before = instance.create_run_for_job(
        defs.resolve_job_def("train_job"), run_config=run_config_of(spec), status=DIED, tags=inherited
    )
    assert isinstance(recovery_requested(instance, before), dg.SkipReason)
    again = instance.create_run_for_job(
        defs.resolve_job_def("train_job"),
        run_config=run_config_of(spec),
        status=DIED,
        tags=inherited,
        parent_run_id=before.run_id,
        root_run_id=before.run_id,
    )
    assert isinstance(recovery_requested(instance, again), dg.RunRequest)
    assert not run_tag(again, PREEMPTED_TAG)
    instance.add_run_tags(again.run_id, {NO_RECOVERY_TAG: own_value(again, "Fenced")})
    now = instance.get_run_by_id(again.run_id)
    assert now is not None
    assert run_tag(now, NO_RECOVERY_TAG) == "Fenced"
    skipped = recovery_requested(instance, now)
    assert isinstance(skipped, dg.SkipReason)
    assert "ended with Fenced" in str(skipped.skip_message)


@pytest.mark.soak
def test_recovery_keeps_settings_and_priority(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Settings of launchers, teams and priorities go with it; what is about the dead run itself does not."""
    spec = left(arena, "tagged")
    tags = {RUN_TAG: spec.run, "team": "vision", "dagster-k8s/config": "{}", "dagster/from_ui": "true", "dlac/due": "x"}
    for given, wanted in (({}, "1"), ({"dagster/priority": "7"}, "7")):
        dead = instance.create_run_for_job(
            defs.resolve_job_def("train_job"), run_config=run_config_of(spec), status=DIED, tags={**tags, **given}
        )
        request = recovery_requested(instance, dead)
        assert isinstance(request, dg.RunRequest)
        assert (request.tags["team"], request.tags["dagster-k8s/config"]) == ("vision", "{}")
        assert request.tags["dagster/priority"] == wanted
        assert not {"dagster/from_ui", "dlac/due"} & set(request.tags)


def test_a_killed_run_leaves_its_pool(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Dagster frees the slots of a run in the run's own process; where that was killed, its recovery would wait for ever."""
    spec = left(arena, "pooled")
    pools = instance.event_log_storage
    pools.set_concurrency_slots(POOL, 1)
    cursor, _ = look(instance, None)
    dead = instance.create_run_for_job(
        defs.resolve_job_def("train_job"), run_config=run_config_of(spec), status=dg.DagsterRunStatus.STARTED
    )
    assert pools.claim_concurrency_slot(POOL, dead.run_id, "model_checkpoint").is_claimed
    instance.report_run_failed(dead, message="Lost")
    assert not pools.claim_concurrency_slot(POOL, "another", "model_checkpoint").is_claimed
    look(instance, cursor)
    assert pools.claim_concurrency_slot(POOL, "another", "model_checkpoint").is_claimed


def test_unwatched_time_is_no_silence(
    arena: Arena, home: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Dagster's storage was away, no run could give a sign of life, and the first look comes before the first of them."""
    run = instance.create_run_for_job(
        defs.resolve_job_def("train_job"),
        run_config=run_config_of(arena.spec("listened-to")),
        status=dg.DagsterRunStatus.STARTED,
    )
    heart = Heartbeat(instance, run.run_id)
    heart.close()
    began, cursor = time.time(), None

    def status_after(looks: list[int]) -> dg.DagsterRunStatus:
        nonlocal cursor
        for passed_s in looks:
            monkeypatch.setattr(
                "dlac_pipeline.dagster.sensors.lost_runs.time.time", lambda passed_s=passed_s: began + passed_s
            )
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            cursor = lost_run_sensor.evaluate_tick(context).cursor
        now = instance.get_run_by_id(run.run_id)
        assert now is not None
        return now.status

    assert status_after([0, 130]) == dg.DagsterRunStatus.STARTED
    assert status_after(list(range(140, 260, 10))) == DIED


@pytest.mark.soak
def test_the_queue_tags_what_trains_and_nothing_else(tmp_path: Path, arena: Arena) -> None:
    """Checks that a person runs by hand neither wait for the training run nor hold its recovery back."""
    overrides = {
        "telemetry": {"enabled": False},
        "run_coordinator": {"module": "dlac_pipeline.dagster.training_runs", "class": TrainingRunCoordinator.__name__},
    }
    config = run_config_of(arena.spec("queued"))
    (tmp_path / "queue").mkdir()
    location = LoadableTargetOrigin(module_name="jobs.definitions")
    with (
        dg.DagsterInstance.local_temp(str(tmp_path / "queue"), overrides=overrides) as instance,
        in_process_test_workspace(instance, location) as workspace,
    ):
        job = workspace.code_locations[0].get_repository("__repository__").get_full_job("__ASSET_JOB")
        tags = []
        origin = {"remote_job_origin": job.get_remote_origin(), "job_code_origin": job.get_python_origin()}
        for assets, checks in (({MODEL}, None), (set(), {CHECK})):
            run = materialized(instance, config, assets, checks, dg.DagsterRunStatus.NOT_STARTED, **origin)
            instance.submit_run(run.run_id, workspace)
            submitted = instance.get_run_by_id(run.run_id)
            assert submitted is not None
            tags.append(submitted.tags.get(RUN_TAG))
        assert tags == ["queued", None]
