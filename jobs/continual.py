"""Continual training: job specs in $DLAC_HOME/jobs whose sources follow appends are trained again when there is something new.

On a schedule, or as soon as a sensor sees a new snapshot. Both are off until somebody turns them on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.failures import RUN_TAG
from catalog.errors import DlacError
from dlac_pipeline.spec import JobSpec, home_folder, read_spec
from jobs.train import train_job

if TYPE_CHECKING:
    from dlac_pipeline.recover.due import Due

FOLDER = "jobs"
"""Of the home folder: one file for each training run that is to be kept going."""
DUE_TAG = "dlac/due"
"""On a requested run: snapshots and head as they were when it was requested."""
_SUFFIXES = (".toml", ".yaml", ".yml")
_UNDER_WAY = [
    status
    for status in dg.DagsterRunStatus
    if status not in (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """What was found for one job spec."""

    spec: JobSpec | None
    due: Due | None
    said: str


@dg.schedule(
    job=train_job,
    cron_schedule="*/15 * * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Trains every run of the folder jobs/ that follows appends and has something new. Off until turned on.",
)
def continual_training_schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
    """A Dagster run for each training run that has something to train and that nobody trains."""
    return _requests(context.instance, context.log, once_per_snapshot=False)


@dg.sensor(
    job=train_job,
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description="Trains a run of the folder jobs/ as soon as a table that it follows has a new snapshot. Off until turned on.",
)
def new_snapshot_sensor(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
    """One Dagster run per snapshot: one that a person cancels is not asked for again until more is appended."""
    return _requests(context.instance, context.log, once_per_snapshot=True)


def _requests(
    instance: dg.DagsterInstance, log: logging.Logger, *, once_per_snapshot: bool
) -> list[dg.RunRequest] | dg.SkipReason:
    looks = list(_looks(instance, log))
    requests = [_request(look.spec, look.due, once_per_snapshot) for look in looks if look.spec and look.due]
    if requests:
        return requests
    folder = home_folder() / FOLDER
    return dg.SkipReason("; ".join(look.said for look in looks) or f"there is no job spec in {str(folder)!r}")


def _looks(instance: dg.DagsterInstance, log: logging.Logger) -> Iterator[_Look]:
    folder = home_folder() / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix not in _SUFFIXES:
            continue
        try:
            yield _look(instance, path)
        except DlacError as err:  # one wrong file does not keep the other runs from training
            log.error(f"{path.name}: {err}")
            yield _Look(spec=None, due=None, said=f"{path.name}: {err}")


def _look(instance: dg.DagsterInstance, path: Path) -> _Look:
    from catalog.connect import connect
    from dlac_pipeline.recover.due import due

    spec = read_spec(path).resolved(home_folder())
    if not any(source.follow == "appends" for source in spec.sources):
        return _Look(spec=None, due=None, said=f"{spec.run} follows no table")
    trained = instance.get_runs(dg.RunsFilter(tags={RUN_TAG: spec.run}, statuses=_UNDER_WAY), limit=1)
    if trained:
        return _Look(spec=None, due=None, said=f"{spec.run} is trained by Dagster run {trained[0].run_id}")
    found = due(connect(spec.lakehouse), spec)
    done = dg.RunsFilter(tags={DUE_TAG: _due_key(spec, found)}, statuses=[dg.DagsterRunStatus.SUCCESS])
    if found.needed and instance.get_runs(done, limit=1):
        return _Look(spec=None, due=None, said=f"{spec.run}: {found.why}, which is less than a batch")
    return _Look(spec=spec, due=found if found.needed else None, said=f"{spec.run}: {found.why}")


def _request(spec: JobSpec, found: Due, once_per_snapshot: bool) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=f"{spec.run}@{_snapshots(found)}" if once_per_snapshot else None,
        run_config=run_config_of(spec),
        tags={RUN_TAG: spec.run, DUE_TAG: _due_key(spec, found), "dlac/why": found.why},
    )


def _due_key(spec: JobSpec, found: Due) -> str:
    """What there was to do: a Dagster run that ended well with it needs no other."""
    return f"{spec.run}@{_snapshots(found)}@{found.head or 'start'}"


def _snapshots(found: Due) -> str:
    return ",".join(map(str, found.snapshot_ids))


def run_config_of(spec: JobSpec) -> dict[str, Any]:
    """The configuration of a Dagster run that trains `spec`."""
    return {"resources": {"job": {"config": {"spec": spec.model_dump(mode="json", exclude_none=True)}}}}
