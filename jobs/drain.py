"""Empty this machine of training runs before it goes away: `python -m jobs.drain` (DAGSTER_HOME names the instance).

Each Dagster run that trains here is marked as preempted, then cancelled: its trainer leaves behind a checkpoint, and the sensors
request its recovery, which runs wherever the queue's launcher starts it. Stop what launches runs on this machine first.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import dagster as dg
import typer

from assets.failures import PREEMPTED_TAG, RUN_TAG
from assets.heartbeat import beats_of
from jobs.train import recover_job, train_job

_TRAINING = (train_job.name, recover_job.name)
_POLL_S = 0.5


def drain(instance: dg.DagsterInstance, *, reason: str, within_s: float) -> tuple[list[str], list[str]]:
    """Preempt every Dagster run that trains on this machine; ids of those that have ended in time, and of those that have not."""
    started = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
    beats = beats_of(instance, [run.run_id for run in started if run.job_name in _TRAINING])
    here = [run_id for run_id, beat in beats.items() if beat.is_here and not beat.is_gone]
    for run_id in here:
        instance.add_run_tags(run_id, {PREEMPTED_TAG: reason})
        instance.run_coordinator.cancel_run(run_id)
    deadline = time.monotonic() + within_s
    left = here
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [run_id for run_id in left if not _has_ended(instance, run_id)]
    return [run_id for run_id in here if run_id not in left], left


def _has_ended(instance: dg.DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is None or run.is_finished


def main(
    reason: Annotated[str, typer.Option(help="Why, for the runs' tag.")] = "drained",
    within_s: Annotated[float, typer.Option(help="Seconds that they get; more than their grace period.")] = 60.0,
) -> None:
    """Preempt the training runs of this machine; exit status 0 only if all have left."""
    with dg.DagsterInstance.get() as instance:
        ended, left = drain(instance, reason=reason, within_s=within_s)
        for run_id in [*ended, *left]:
            run = instance.get_run_by_id(run_id)
            name = run.tags.get(RUN_TAG, "") if run else ""
            print(f"{name} ({run_id}): {'has left' if run_id in ended else 'is still there'}")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    typer.run(main)
