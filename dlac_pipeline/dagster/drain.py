"""Drain of this node before it is shut down: `python -m dlac_pipeline.dagster.drain`. DAGSTER_HOME names the instance.

Each Dagster run that trains here is marked as preempted, then cancelled. Its trainer exits after a checkpoint, and the sensors
request its recovery. First stop all launchers of this node.
"""

import sys
import time
from contextlib import suppress
from typing import Annotated

import dagster as dg
import typer
from typer import Option

from dlac_pipeline.dagster.failures import PREEMPTED_TAG, own_value
from dlac_pipeline.dagster.heartbeat import beats_of
from dlac_pipeline.dagster.training_runs import names_of_training

_UNDER_WAY = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
_POLL_S = 0.5


def drain(instance: dg.DagsterInstance, *, reason: str, within_s: float) -> tuple[list[str], dict[str, str]]:
    """Preempt every Dagster run training on this node. Return the ids of runs that exited in time, and the reasons for the rest.

    The first heartbeat of a starting run shows its node, so it is waited for.
    """
    deadline = time.monotonic() + within_s
    notified: dict[str, str] = {}
    while True:
        remaining = _remaining(instance, notified, reason)
        if not remaining or time.monotonic() >= deadline:
            return [run_id for run_id in notified if run_id not in remaining], remaining
        time.sleep(_POLL_S)


def _remaining(instance: dg.DagsterInstance, notified: dict[str, str], reason: str) -> dict[str, str]:
    """Return the runs that are or may be on this node, with a note on each. Those not yet `notified` are preempted."""
    under_way = instance.get_runs(dg.RunsFilter(statuses=_UNDER_WAY))
    runs = [run for run in under_way if names_of_training(instance, run)]
    beats = beats_of(instance, [run.run_id for run in runs])
    remaining = {}
    for run in runs:
        beat = beats.get(run.run_id)
        if run.run_id in notified:
            remaining[run.run_id] = notified[run.run_id]
        elif beat is None:
            remaining[run.run_id] = "it has sent no heartbeat yet: it may start on this node"
        elif beat.is_here and not beat.is_gone:
            is_notified, remaining[run.run_id] = _preempt(instance, run, reason)
            if is_notified:
                notified[run.run_id] = remaining[run.run_id]
    return remaining


def _preempt(instance: dg.DagsterInstance, run: dg.DagsterRun, reason: str) -> tuple[bool, str]:
    """Preempt a run, unless it is ending already. Return True if it will notice, and a note."""
    if run.status == dg.DagsterRunStatus.CANCELING:
        return True, "it was cancelled before"
    try:
        instance.add_run_tags(run.run_id, {PREEMPTED_TAG: own_value(run, reason)})
        instance.run_coordinator.cancel_run(run.run_id)
    except Exception as err:  # a code server that is gone: the run's process reads its status, and exits
        is_canceling = False
        with suppress(Exception):  # the storage cannot be read
            now = instance.get_run_by_id(run.run_id)
            is_canceling = now is None or now.is_finished or now.status == dg.DagsterRunStatus.CANCELING
        return is_canceling, f"it could not be notified directly: {type(err).__name__}"
    return True, "it was asked to"


def drain_node(
    reason: Annotated[str, Option(help="Why, for the runs' tag.")] = "drained",
    within_s: Annotated[float, Option(help="Seconds they get; more than launch.deadline_s.")] = 60.0,
) -> None:
    """Preempt the training runs of this node. Exit status 0 only if all have exited."""
    with dg.DagsterInstance.get() as instance:
        ended, remaining = drain(instance, reason=reason, within_s=within_s)
        states = {each: f"has not exited; {note}" for each, note in remaining.items()}
        for run_id, state in {**dict.fromkeys(ended, "has exited"), **states}.items():
            run = instance.get_run_by_id(run_id)
            names = ", ".join(names_of_training(instance, run)) if run else ""
            print(f"{names} ({run_id}): {state}")
    sys.exit(1 if remaining else 0)


if __name__ == "__main__":
    typer.run(drain_node)
