"""Continual training: job specs in $DLAC_HOME/jobs whose sources follow appends are trained again when new rows exist.

It runs on a schedule, or as soon as a sensor sees a new snapshot. Both are off until a person turns them on. A run whose end
needs a person is not requested again until its work changes.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from blake3 import blake3

from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, PREEMPTED_TAG, RUN_TAG, STEPPED_ASIDE_TAG, run_tag
from dlac_pipeline.dagster.sensors.recovery import living_trainer, recovery_of
from dlac_pipeline.dagster.settings import settings_or_defaults
from dlac_pipeline.dagster.training_runs import (
    RUNS_JOB,
    TrainingJob,
    model_key,
    names_of_training,
    plan_key,
    trained_by,
    training_runs,
)
from dlac_pipeline.lakehouse.errors import DlacError, RunBusy
from dlac_pipeline.spec.job_spec import JobSpec, home_folder, read_spec

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.operations.pending_work import Due

FOLDER = "jobs"
"""Folder in the home folder, with one file for each training run to continue."""
DUE_TAG = "dlac/due"
"""Tag of a requested run: its pending work, and the head at that moment (see `due_key`)."""
_GOES_ON = (
    "it continues when something is appended, its job spec or script is changed, or it is rewound or launched by hand"
)
_PAGE = 20
"""Dagster runs that are read at once."""
_SUFFIXES = (".toml", ".yaml", ".yml")
_UNDER_WAY = [
    status
    for status in dg.DagsterRunStatus
    if status not in (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
]


def build_continual_schedule(
    job: TrainingJob, *, cron_schedule: str, name: str = "continual_training_schedule"
) -> dg.ScheduleDefinition:
    """Return the schedule that requests a Dagster run for each training run that has rows to train and no trainer.

    `job` is the job on training runs that are assets, or the one that trains the job files of the folder.
    """

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=cron_schedule,
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Trains each run that follows appends and has new rows. Off until you turn it on.",
    )
    def continual_training_schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        return _requests(context.instance, context.log, job, once_per_snapshot=False)

    return continual_training_schedule


def build_new_snapshot_sensor(train_job: TrainingJob, *, name: str = "new_snapshot_sensor") -> dg.SensorDefinition:
    """Return the sensor that requests one Dagster run per snapshot, rewind, spec and script.

    Dagster launches nothing for a run key that it has seen.
    """

    @dg.sensor(
        name=name,
        job=train_job,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Trains a run once a table that it follows has a new snapshot. Off until you turn it on.",
    )
    def new_snapshot_sensor(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        return _requests(context.instance, context.log, train_job, once_per_snapshot=True)

    return new_snapshot_sensor


def _requests(
    instance: dg.DagsterInstance, log: logging.Logger, job: TrainingJob, *, once_per_snapshot: bool
) -> list[dg.RunRequest] | dg.SkipReason:
    looks = list(_looks(instance, job, log))
    requests = [_request(*look, job, once_per_snapshot) for look in looks if not isinstance(look, str)]
    if requests:
        return requests
    reasons = "; ".join(look for look in looks if isinstance(look, str))
    return dg.SkipReason(reasons or f"there is no job spec in {str(job_folder())!r}")


def _looks(
    instance: dg.DagsterInstance, job: TrainingJob, log: logging.Logger
) -> "Iterator[tuple[JobSpec, Due] | str]":
    """Yield what is due for each job spec, or why nothing is."""
    for name, read in _specs(job):
        try:
            spec = read()
            if job.name != RUNS_JOB and model_key(spec.run) in training_runs():
                yield f"{spec.run} is trained as an asset"
            else:
                yield _look(instance, spec, log)
        except DlacError as err:  # one wrong file does not keep the other runs from training
            log.error(f"{name}: {err}")
            yield f"{name}: {err}"


def _specs(job: TrainingJob) -> "Iterator[tuple[str, Callable[[], JobSpec]]]":
    """Yield the name and the reader of each job spec that a job trains: of an asset, or a file without an asset."""
    if job.name == RUNS_JOB:
        yield from ((key.path[1], partial(read, {})) for key, read in training_runs().items())
        return
    for path in job_files(job_folder()):
        yield path.name, partial(_read_file, path)


def _read_file(path: Path) -> JobSpec:
    return read_spec(path).resolved(home_folder())


def job_folder() -> Path:
    """Return the folder with one job file for each training run to continue."""
    return home_folder() / FOLDER


def job_files(folder: Path) -> list[Path]:
    """Return the job files in a folder."""
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES) if folder.is_dir() else []


def _look(instance: dg.DagsterInstance, spec: JobSpec, log: logging.Logger) -> "tuple[JobSpec, Due] | str":
    from dlac_pipeline.lakehouse.iceberg.connect import connect
    from dlac_pipeline.operations.pending_work import due

    if not any(source.follow == "appends" for source in spec.sources):
        return f"{spec.run} follows no table"
    trained = instance.get_runs(dg.RunsFilter(tags={RUN_TAG: spec.run}, statuses=_UNDER_WAY), limit=1)
    if trained:
        return f"{spec.run} is trained by Dagster run {trained[0].run_id}"
    lakehouse = connect(spec.lakehouse)
    found = due(lakehouse, spec)
    obstacle = _held_back(instance, lakehouse, spec, found, log) if found.needed else ""
    if obstacle or not found.needed:
        return f"{spec.run}: {found.reason}{obstacle}"
    return spec, found


def _held_back(
    instance: dg.DagsterInstance, lakehouse: "Lakehouse", spec: JobSpec, found: "Due", log: logging.Logger
) -> str:
    """Return why nothing is requested although new rows exist, as the rest of a sentence. Empty: it is requested."""
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger
    from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS

    done = dg.RunsFilter(tags={DUE_TAG: due_key(spec, found)}, statuses=[dg.DagsterRunStatus.SUCCESS])
    if instance.get_runs(done, limit=1):
        return ", which is less than a batch"
    rows = Ledger(lakehouse).rows(spec.run, kinds=HEAD_KINDS)
    trainer = living_trainer(instance, rows, settings_or_defaults(log).recovery)
    if trainer:
        return f", but {trainer} trains it"
    given_up = _given_up(instance, spec, found, log)
    return f", but {given_up}; {_GOES_ON}" if given_up else ""


def _given_up(instance: dg.DagsterInstance, spec: JobSpec, found: "Due", log: logging.Logger) -> str:
    """Return the Dagster run that needs a person before the work is tried again, and the reason. Empty: none does.

    The newest one shows how it ended, and may be a recovery, or launched by hand. The newest that was requested here shows
    its purpose. The head does not count, because runs that end like that may have committed something before.
    """
    newest = None
    for run in _newest_first(instance, spec.run):
        if newest is None:
            if not names_of_training(instance, run) or run_tag(run, STEPPED_ASIDE_TAG):
                continue
            newest, ending = run, _needs_a_person(instance, run, log)
            if not ending:
                return ""
        purpose = run_tag(run, DUE_TAG).rpartition("@")[0]
        if purpose:
            return f"Dagster run {newest.run_id} {ending}" if purpose == _purpose(spec, found) else ""
    return ""


def _needs_a_person(instance: dg.DagsterInstance, ended: dg.DagsterRun, log: logging.Logger) -> str:
    """Return why no other Dagster run may follow an ended one. Empty: one may."""
    if ended.status == dg.DagsterRunStatus.CANCELED:
        return "" if run_tag(ended, PREEMPTED_TAG) else "was cancelled by a person"
    if ended.status != dg.DagsterRunStatus.FAILURE:
        return ""
    no_recovery = run_tag(ended, NO_RECOVERY_TAG)
    if no_recovery == RunBusy.__name__:
        return ""  # that launch is gone, or it would have been found
    if no_recovery:
        return f"ended with {no_recovery}"
    for trained in trained_by(instance, ended):
        recovery = recovery_of(instance, ended, trained, noticed_by="continual training", log=log)
        if isinstance(recovery, dg.SkipReason) and "NoProgress" in str(recovery.skip_message):
            return f"was given up ({recovery.skip_message})"
    return ""


def _newest_first(instance: dg.DagsterInstance, run: str) -> Iterator[dg.DagsterRun]:
    """The Dagster runs of a training run."""
    cursor = None
    while page := instance.get_runs(dg.RunsFilter(tags={RUN_TAG: run}), cursor=cursor, limit=_PAGE):
        yield from page
        cursor = page[-1].run_id


def _request(spec: JobSpec, found: "Due", job: TrainingJob, once_per_snapshot: bool) -> dg.RunRequest:
    is_asset = job.name == RUNS_JOB
    return dg.RunRequest(
        run_key=_purpose(spec, found) if once_per_snapshot else None,
        run_config={} if is_asset else run_config_of(spec),
        asset_selection=[plan_key(spec.run), model_key(spec.run)] if is_asset else None,
        tags={RUN_TAG: spec.run, DUE_TAG: due_key(spec, found), "dlac/why": found.reason},
    )


def due_key(spec: JobSpec, found: "Due") -> str:
    """Return the work and its start as a key: a Dagster run that ended well with it needs no successor.

    A head that was restored by a rewind differs from the same head at its commit: the training after it does not count.
    """
    return f"{_purpose(spec, found)}@{found.head or 'start'}.{found.stepped_back}"


def _purpose(spec: JobSpec, found: "Due") -> str:
    """Return the snapshots to train, the last rewind, and the spec and script of the training."""
    from dlac_pipeline.checkpoint.training_config import config_digest  # of the script as well

    digest = blake3((spec.model_dump_json() + config_digest(spec)).encode()).hexdigest(length=16)
    return f"{spec.run}@{','.join(map(str, found.snapshot_ids))}@{found.rewound}@{digest}"


def run_config_of(spec: JobSpec) -> dict[str, Any]:
    """The configuration of a Dagster run that trains `spec`."""
    return {"resources": {"job": {"config": {"spec": spec.model_dump(mode="json", exclude_none=True)}}}}
