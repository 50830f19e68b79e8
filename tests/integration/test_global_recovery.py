"""What the sensors of global recovery make of Dagster runs that have ended, on a real lakehouse and a real instance."""

import sqlite3
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest

from dlac_pipeline.dagster.assets.training import POOL
from dlac_pipeline.dagster.failures import OUTAGE_TAG
from dlac_pipeline.dagster.heartbeat import Heartbeat
from dlac_pipeline.dagster.sensors.lost_runs import lost_run_sensor
from dlac_pipeline.dagster.sensors.recovery import RECOVERS_TAG
from dlac_pipeline.dagster.training_runs import model_key, names_of_training, plan_key
from dlac_pipeline.lakehouse.errors import SteppedAside
from dlac_pipeline.lakehouse.ledger.commits import check_current, claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena
from tests.dagster_runs import dagster_run, project, recovery_requested

pytestmark = pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
DIED = dg.DagsterRunStatus.FAILURE


def step_of(spec: JobSpec) -> str:
    """The step that trains a run."""
    return model_key(spec.run).to_python_identifier()


def left(arena: Arena, run: str) -> JobSpec:
    """The spec of a run that was left after step 10."""
    arena.table(appends=(500,))
    return arena.trained(run, world_size=1, until=15)


def test_only_training_materializations_are_recovered(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Runs of the plan or of checks alone, and jobs that people write, train nothing that the sensor recovers."""
    spec = left(arena, "materialized")
    cursor, answers = look(instance, spec, None)
    assert answers == []
    model = dagster_run(instance, spec)
    plan = dagster_run(instance, spec, key=plan_key(spec.run))
    own = dg.define_asset_job("own_job", dg.AssetSelection.assets(model_key(spec.run)))
    defs = dg.Definitions.merge(project(spec), dg.Definitions(jobs=[own]))
    alone = {dg.AssetCheckKey(model_key(spec.run), "checkpoint_restorable")}
    checks_job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_check_selection=alone)
    started = dg.DagsterRunStatus.STARTED
    checks, by_own_job = (
        instance.create_run_for_job(job, status=started) for job in (checks_job, defs.resolve_job_def("own_job"))
    )
    assert [names_of_training(instance, run) for run in (model, plan, checks)] == [[spec.run], [], []]
    for run in (model, plan, checks, by_own_job):
        instance.report_run_failed(run, message="it died")
    recovered = []
    for _ in range(4):
        cursor, answers = look(instance, spec, cursor)
        recovered += answers
    [request] = recovered
    assert request.tags[RECOVERS_TAG] == model.run_id


def look(instance: dg.DagsterInstance, spec: JobSpec, cursor: str | None) -> tuple[str | None, list[dg.RunRequest]]:
    """One tick of the recovery sensor: its new cursor, and what it requested."""
    repository = project(spec).get_repository_def()
    context = dg.build_sensor_context(instance=instance, cursor=cursor, repository_def=repository)
    data = repository.get_sensor_def("recovery_sensor").evaluate_tick(context)
    return context.cursor or data.cursor, list(data.run_requests or [])


def test_failed_decision_requests_recovery(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """A recovery is requested even if the catalog is locked, because Dagster asks only once about a run."""
    spec = left(arena, "unlucky")
    dead = dagster_run(instance, spec, DIED)
    arena.monkeypatch.setattr(Ledger, "rows", Mock(side_effect=sqlite3.OperationalError("database is locked")))
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    assert request.run_config["ops"][step_of(spec)]["config"]["takeover"] is False


@pytest.mark.soak
def test_attempt_begun_during_decision_stays(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """A person's `dlac recover` answers the same death: the recovery replaces what it saw dead, and so steps aside."""
    spec = left(arena, "answered-twice")
    dead = dagster_run(instance, spec, DIED)
    ledger = Ledger(arena.lakehouse)
    [attempt] = [row.attempt for row in ledger.rows(spec.run, kinds=(ClaimRow,))]
    original = Ledger.rows

    def read(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        arena.monkeypatch.setattr(Ledger, "rows", original)
        claim(ledger, spec.run, nonce="by-hand", replaces=attempt, facts={"launched_by": ""})
        return found

    arena.monkeypatch.setattr(Ledger, "rows", read)
    request = recovery_requested(instance, dead)
    assert isinstance(request, dg.RunRequest)
    assert ledger.state(spec.run).fence.attempt == attempt + 1
    launch = request.run_config["ops"][step_of(spec)]["config"]
    assert (launch["takeover"], launch["replaces"]) == (True, attempt)
    with pytest.raises(SteppedAside):
        check_current(ledger.state(spec.run), launch["replaces"])


@pytest.mark.soak
def test_recovery_keeps_settings_and_priority(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """A recovery inherits tags of launchers, teams and priorities, but none about the dead run, or an outage before its head."""
    spec, long_ago = left(arena, "tagged"), time.time() - 172_800
    tags = {"team": "vision", "dagster-k8s/config": "{}", "dagster/from_ui": "true", "dlac/due": "x"}
    tags |= {OUTAGE_TAG: "CatalogUnreachable", "dlac/outage_since": str(long_ago)}
    tags |= {"dlac/head": "what it was then", "dlac/recoveries_in_a_row": "1"}
    for given, wanted in (({}, "1"), ({"dagster/priority": "7"}, "7")):
        request = recovery_requested(instance, dagster_run(instance, spec, DIED, tags={**tags, **given}))
        assert isinstance(request, dg.RunRequest)
        assert (request.tags["team"], request.tags["dagster-k8s/config"]) == ("vision", "{}")
        assert request.tags["dagster/priority"] == wanted
        assert not {"dagster/from_ui", "dlac/due"} & set(request.tags)
        assert float(request.tags["dlac/outage_since"]) > long_ago + 172_000
        assert request.tags["dlac/recoveries_in_a_row"] == "1"


@pytest.mark.slow
def test_a_killed_run_leaves_its_pool(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Dagster frees the slots of a run in the run's own process; where that was killed, its recovery would wait for ever."""
    spec = left(arena, "pooled")
    pools = instance.event_log_storage
    pools.set_concurrency_slots(POOL, 1)
    cursor, _ = look(instance, spec, None)
    dead = dagster_run(instance, spec)
    assert pools.claim_concurrency_slot(POOL, dead.run_id, step_of(spec)).is_claimed
    instance.report_run_failed(dead, message="Lost")
    assert not pools.claim_concurrency_slot(POOL, "another", step_of(spec)).is_claimed
    look(instance, spec, cursor)
    assert pools.claim_concurrency_slot(POOL, "another", step_of(spec)).is_claimed


@pytest.mark.slow
def test_unwatched_time_is_no_silence(arena: Arena, home: Path, instance: dg.DagsterInstance) -> None:
    """Where Dagster's storage was away, no run could give a sign of life, and the first look comes before the first of them."""
    run = dagster_run(instance, arena.spec("listened-to"))
    Heartbeat(instance, run.run_id).close()
    began, cursor = time.time(), None

    def status_after(looks: list[int]) -> dg.DagsterRunStatus:
        nonlocal cursor
        for passed_s in looks:
            arena.monkeypatch.setattr(time, "time", lambda passed_s=passed_s: began + passed_s)
            cursor = lost_run_sensor.evaluate_tick(dg.build_sensor_context(instance=instance, cursor=cursor)).cursor
        now = instance.get_run_by_id(run.run_id)
        assert now is not None
        return now.status

    assert status_after([0, 130]) == dg.DagsterRunStatus.STARTED
    assert status_after(list(range(140, 260, 10))) == DIED
