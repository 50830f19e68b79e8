"""Helpers of Dagster tests: run configurations, waiting for a step, events, and the ticks of sensors."""

from __future__ import annotations

from typing import Any

import dagster as dg
import psutil

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.dagster.heartbeat import beats_of
from dlac_pipeline.dagster.sensors.recovery import recovery_of
from dlac_pipeline.dagster.training_runs import trained_by
from dlac_pipeline.spec.job_spec import JobSpec
from examples.demo.local_dagster import LiveRun, LocalDagster
from jobs.definitions import defs
from tests.conftest import Arena, wait_until


def job_config(spec: JobSpec) -> dict[str, Any]:
    """Return the run configuration of a training run."""
    return {"resources": {"job": {"config": {"spec": spec.model_dump(mode="json", exclude_none=True)}}}}


def dagster_run(
    instance: dg.DagsterInstance,
    spec: JobSpec,
    status: dg.DagsterRunStatus,
    job: str = "train_job",
    **tags: str,
) -> dg.DagsterRun:
    """Add a run of a job in a state. In names of tags "__" means "/"."""
    return instance.create_run_for_job(
        defs.resolve_job_def(job),
        run_config=job_config(spec),
        status=status,
        tags={RUN_TAG: spec.run, **{name.replace("__", "/"): value for name, value in tags.items()}},
    )


def recovery_requested(instance: dg.DagsterInstance, dead: dg.DagsterRun) -> dg.RunRequest | dg.SkipReason:
    """Return what the recovery sensor decides about the one training run of a Dagster run."""
    (trained,) = trained_by(instance, dead)
    return recovery_of(instance, dead, trained, noticed_by="test", log=dg.get_dagster_logger())


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
    """Launch a Dagster run, wait for a step, and return its id and its processes, from the run's own to the ranks."""
    live = LiveRun(spec.checkpoint.store, spec.run)
    run_id = dagster.launch("train_job", job_config(spec))
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
