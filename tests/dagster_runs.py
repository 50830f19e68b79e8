"""Helpers of Dagster tests: definitions of training runs, waiting for a step, events, and the ticks of sensors."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psutil
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster import Recovery, TrainingRun
from dlac_pipeline.dagster.assets import supervised
from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.dagster.heartbeat import beats_of
from dlac_pipeline.dagster.sensors.recovery import decide_recoveries
from dlac_pipeline.dagster.training_runs import model_key
from dlac_pipeline.spec.job_spec import JobSpec
from examples.demo.live_run import LiveRun
from examples.demo.local_dagster import LocalDagster
from tests.conftest import Arena, wait_until
from tests.forked import Forked


def fork_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an asset that is materialized in this process start its supervisor as a forked program."""
    monkeypatch.setattr(supervised, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))


def project(*specs: JobSpec, **attributes: Any) -> dg.Definitions:
    """Return the definitions of a project with these training runs, which can be recovered."""
    settings = [spec.model_dump(mode="json", exclude_none=True) for spec in specs]
    runs = [TrainingRun(spec=each, **attributes).build_in(Path()) for each in settings]
    return dg.Definitions.merge(*runs, Recovery().build_defs(), dg.Definitions(executor=dg.in_process_executor))


def dagster_run(
    instance: dg.DagsterInstance,
    spec: JobSpec,
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED,
    *,
    key: dg.AssetKey | None = None,
    tags: dict[str, str] | None = None,
    **of: Any,
) -> dg.DagsterRun:
    """Add a Dagster run in a state that is to materialize an asset of a training run, or its model, as *Materialize* does."""
    asset = key or model_key(spec.run)
    job = project(spec).resolve_implicit_global_asset_job_def().get_subset(asset_selection={asset})
    return instance.create_run_for_job(
        job, status=status, tags={RUN_TAG: spec.run, **(tags or {})}, asset_selection=frozenset({asset}), **of
    )


def evaluate_checks(spec: JobSpec) -> dict[str, dg.AssetCheckEvaluation]:
    """Return the results of the checks of a training run, by name, as a person runs them alone."""
    selection = dg.AssetSelection.checks_for_assets(model_key(spec.run))
    job = dg.define_asset_job("checks", selection, executor_def=dg.in_process_executor)
    defs = dg.Definitions.merge(project(spec), dg.Definitions(jobs=[job]))
    with dg.DagsterInstance.ephemeral() as instance:
        done = defs.resolve_job_def("checks").execute_in_process(instance=instance)
        return {each.check_name: each for each in done.get_asset_check_evaluations()}


def recovery_requested(instance: dg.DagsterInstance, dead: dg.DagsterRun) -> dg.RunRequest | dg.SkipReason:
    """Return what the recovery sensor decides about the one training run of a Dagster run."""
    (found,) = decide_recoveries(instance, dead, noticed_by="test", log=dg.get_dagster_logger())
    return found


def wait_for_step(live: LiveRun, dagster: LocalDagster, run_id: str, step: int) -> None:
    """Wait until the ranks have finished a step."""
    with dagster.instance() as instance:

        def has_reached() -> bool:
            run = instance.get_run_by_id(run_id)
            assert run is None or not run.is_finished, f"{run.status} before step {step}"
            return live.step() >= step

        wait_until(has_reached, what=f"step {step}")


def events_of(dagster: LocalDagster, run_id: str, kind: dg.DagsterEventType) -> list[Any]:
    """Return the events of one kind of a Dagster run."""
    with dagster.instance() as instance:
        return [entry.dagster_event for entry in instance.all_logs(run_id, of_type=kind)]


def sensor_ticks(dagster: LocalDagster, after: float, *, sensor: str = "recovery_sensor") -> int:
    """Return the number of a sensor's evaluations that began after a moment and have ended."""
    with dagster.instance() as instance:
        (state,) = (one for one in instance.all_instigator_state() if one.instigator_name == sensor)
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, after=after)
        return sum(1 for tick in ticks if tick.end_timestamp is not None)


def runs_that_recover(dagster: LocalDagster, run_id: str) -> list[dg.DagsterRun]:
    """Return the recoveries that were requested for a Dagster run."""
    with dagster.instance() as instance:
        return list(instance.get_runs(dg.RunsFilter(tags={"dlac/recovers": run_id})))


def train_to(dagster: LocalDagster, spec: JobSpec, *, step: int = 15) -> tuple[str, list[psutil.Process]]:
    """Train a run with a job file, wait for a step, and return its id and its processes, from the run's own to the ranks."""
    live = LiveRun(spec.checkpoint.store, spec.run)
    run_id = dagster.train(spec.run)
    wait_for_step(live, dagster, run_id, step)
    with dagster.instance() as instance:
        worker = psutil.Process(beats_of(instance, [run_id])[run_id].pid)
    return run_id, [worker, *worker.children(recursive=True)]


def have_ended(processes: list[psutil.Process]) -> bool:
    """Return whether none of the processes runs. A zombie does not run."""
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def check_healed(campaign: Arena, dagster: LocalDagster, spec: JobSpec, run_id: str) -> dg.DagsterRun:
    """Wait for the one recovery, and check that the run is finished and no row was lost or repeated."""
    recovery = dagster.wait(dagster.recovery_of(run_id))
    assert recovery.status == dg.DagsterRunStatus.SUCCESS
    assert len(runs_that_recover(dagster, run_id)) == 1
    assert audit_run(campaign.lakehouse, spec.run).exact
    assert campaign.losses(spec.run) == campaign.losses("reference")
    assert campaign.journal(spec.run) == campaign.journal("reference")
    return recovery
