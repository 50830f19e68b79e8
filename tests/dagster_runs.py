"""What tests of Dagster share: run configurations, waiting for a step, events, and the ticks of sensors."""

from __future__ import annotations

from typing import Any

import dagster as dg
import psutil

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.dagster.heartbeat import beats_of
from dlac_pipeline.spec.job_spec import JobSpec
from jobs.definitions import defs
from jobs.local_dagster import LiveRun, LocalDagster
from tests.conftest import Arena, wait_until


def job_config(spec: JobSpec) -> dict[str, Any]:
    """The run configuration of a training run."""
    return {"resources": {"job": {"config": {"spec": spec.model_dump(mode="json", exclude_none=True)}}}}


def dagster_run(
    instance: dg.DagsterInstance,
    spec: JobSpec,
    status: dg.DagsterRunStatus,
    job: str = "train_job",
    **tags: str,
) -> dg.DagsterRun:
    """A run of a job in a state; in names of tags "__" stands for "/"."""
    return instance.create_run_for_job(
        defs.resolve_job_def(job),
        run_config=job_config(spec),
        status=status,
        tags={RUN_TAG: spec.run, **{name.replace("__", "/"): value for name, value in tags.items()}},
    )


def wait_for_step(live: LiveRun, dagster: LocalDagster, run_id: str, step: int) -> None:
    """Wait until the ranks have finished a step."""
    with dagster.instance() as instance:

        def reached() -> bool:
            run = instance.get_run_by_id(run_id)
            assert run is None or not run.is_finished, f"{run.status} before step {step}"
            return live.step() >= step

        wait_until(reached, what=f"step {step}")


def events_of(dagster: LocalDagster, run_id: str, kind: dg.DagsterEventType) -> list[Any]:
    """The events of one kind of a Dagster run."""
    with dagster.instance() as instance:
        return [entry.dagster_event for entry in instance.all_logs(run_id, of_type=kind)]


def sensor_ticks(dagster: LocalDagster, after: float, *, sensor: str = "recovery_sensor") -> int:
    """Evaluations of a sensor that began after a moment and have ended."""
    with dagster.instance() as instance:
        (state,) = (one for one in instance.all_instigator_state() if one.instigator_name == sensor)
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, after=after)
        return sum(1 for tick in ticks if tick.end_timestamp is not None)


def runs_that_recover(dagster: LocalDagster, run_id: str) -> list[dg.DagsterRun]:
    """The recoveries that were requested for a Dagster run."""
    with dagster.instance() as instance:
        return list(instance.get_runs(dg.RunsFilter(tags={"dlac/recovers": run_id})))


def trained_to(dagster: LocalDagster, spec: JobSpec, *, step: int = 15) -> tuple[str, list[psutil.Process]]:
    """A Dagster run that has trained to a step; its id, and its processes, from the run's own down to the ranks."""
    live = LiveRun(spec.checkpoint.store, spec.run)
    run_id = dagster.launch("train_job", job_config(spec))
    wait_for_step(live, dagster, run_id, step)
    with dagster.instance() as instance:
        worker = psutil.Process(beats_of(instance, [run_id])[run_id].pid)
    return run_id, [worker, *worker.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs; one that nobody has asked about does not."""
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def check_healed(campaign: Arena, dagster: LocalDagster, spec: JobSpec, run_id: str) -> dg.DagsterRun:
    """Wait for the one recovery; the run is finished, and nothing was lost or repeated."""
    recovery = dagster.wait(dagster.recovery_of(run_id))
    assert recovery.status == dg.DagsterRunStatus.SUCCESS
    assert len(runs_that_recover(dagster, run_id)) == 1
    assert audit_run(campaign.lakehouse, spec.run).exact
    assert campaign.losses(spec.run) == campaign.losses("reference")
    assert campaign.journal(spec.run) == campaign.journal("reference")
    return recovery
