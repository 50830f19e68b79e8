"""Continual training, by a schedule or by a sensor on new snapshots: sources that follow appends are trained again.

Both are off until a person turns them on. A run whose end needs a person is not requested again until its work changes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

import dagster as dg
from blake3 import blake3

from dlac_pipeline.dagster import training_runs as runs
from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, PREEMPTED_TAG, RUN_TAG, STEPPED_ASIDE_TAG, run_tag
from dlac_pipeline.dagster.sensors.recovery import decide_recoveries, living_trainer
from dlac_pipeline.dagster.settings import settings_or_defaults
from dlac_pipeline.lakehouse.errors import DlacError, RunBusy
from dlac_pipeline.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from dlac_pipeline.dagster.sensors.pending_work import Due
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

DUE_TAG = "dlac/due"
"""Tag of a requested run: its pending work, and the head at that moment (see `due_key`)."""
_GOES_ON = (
    "it continues when something is appended, its job spec or script changes, or it is rewound or launched by hand"
)
RUNS_PER_PAGE = 100
"""Dagster runs of one read."""
_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_UNDER_WAY = [status for status in dg.DagsterRunStatus if status not in _ENDED]


def build_continual_schedule(runs_job: runs.TrainingJob, *, cron_schedule: str) -> dg.ScheduleDefinition:
    """Return the schedule that requests a Dagster run for each training run that has rows to train and no trainer."""
    return dg.schedule(
        name="continual_training_schedule",
        job=runs_job,
        cron_schedule=cron_schedule,
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Trains each run that follows appends and has new rows. Off until you turn it on.",
    )(lambda context: _requests(context.instance, context.log, once_per_snapshot=False))


def build_new_snapshot_sensor(runs_job: runs.TrainingJob) -> dg.SensorDefinition:
    """Return the sensor that requests one Dagster run per snapshot, rewind, spec and script, by its run key."""
    return dg.sensor(
        name="new_snapshot_sensor",
        job=runs_job,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Trains a run once a table that it follows has a new snapshot. Off until you turn it on.",
    )(lambda context: _requests(context.instance, context.log, once_per_snapshot=True))


def _requests(
    instance: dg.DagsterInstance, log: logging.Logger, *, once_per_snapshot: bool
) -> list[dg.RunRequest] | dg.SkipReason:
    looks = list(_looks(instance, log))
    requests = [
        dg.RunRequest(
            run_key=_purpose(spec, found) if once_per_snapshot else None,
            asset_selection=[runs.plan_key(spec.run), runs.model_key(spec.run)],
            tags={RUN_TAG: spec.run, DUE_TAG: due_key(spec, found), "dlac/why": found.reason},
        )
        for spec, found in (look for look in looks if not isinstance(look, str))
    ]
    reasons = "; ".join(look for look in looks if isinstance(look, str))
    return requests or dg.SkipReason(reasons or "this code location defines no training run")


def _looks(instance: dg.DagsterInstance, log: logging.Logger) -> "Iterator[tuple[JobSpec, Due] | str]":
    """Yield the requests that are due for each training run, or why none is due. Job files that define no run are named."""
    yield from runs.wrong_job_files
    trainers = cache(lambda: _trainers(instance))
    for name, run in list(runs.defined_runs.items()):
        try:
            yield _look(instance, run.job_spec(), trainers, log)
        except DlacError as err:  # one wrong file does not keep the other runs from training
            log.error(f"{name}: {err}")
            yield f"{name}: {err}"


def _trainers(instance: dg.DagsterInstance) -> dict[str, str]:
    """Return the newest Dagster run under way for each training run, by its tag and by the models it is to materialize."""
    trainers: dict[str, str] = {}
    for each in instance.get_runs(dg.RunsFilter(statuses=_UNDER_WAY)):
        # that of *Materialize* has no tag before its model's step
        for name in (each.tags.get(RUN_TAG, ""), *runs.names_of_training(instance, each)):
            trainers.setdefault(name, each.run_id)
    return trainers


def _look(
    instance: dg.DagsterInstance, spec: JobSpec, trainers: Callable[[], Mapping[str, str]], log: logging.Logger
) -> "tuple[JobSpec, Due] | str":
    from dlac_pipeline.dagster.sensors.pending_work import due
    from dlac_pipeline.lakehouse.iceberg.connect import connect

    if not any(source.follow == "appends" for source in spec.sources):
        return f"{spec.run} follows no table"
    if trainer := trainers().get(spec.run):
        return f"{spec.run} is trained by Dagster run {trainer}"
    lakehouse = connect(spec.lakehouse, tables=spec.own_tables)
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
            refused = run_tag(run, NO_RECOVERY_TAG) == RunBusy.__name__
            if refused or not runs.names_of_training(instance, run) or run_tag(run, STEPPED_ASIDE_TAG):
                continue
            newest, ending = run, _needs_a_person(instance, run, log)
            if not ending:
                return ""
        purpose = run_tag(run, DUE_TAG).rpartition("@")[0]
        if purpose:
            return f"Dagster run {newest.run_id} {ending}" if purpose == _purpose(spec, found) else ""
    return ""


def _newest_first(instance: dg.DagsterInstance, run: str) -> Iterator[dg.DagsterRun]:
    cursor, filters = None, dg.RunsFilter(tags={RUN_TAG: run})
    while page := instance.get_runs(filters, cursor=cursor, limit=RUNS_PER_PAGE):
        yield from page
        cursor = page[-1].run_id


def _needs_a_person(instance: dg.DagsterInstance, ended: dg.DagsterRun, log: logging.Logger) -> str:
    """Return why no other Dagster run may follow an ended one. Empty: one may."""
    if ended.status == dg.DagsterRunStatus.CANCELED:
        return "" if run_tag(ended, PREEMPTED_TAG) else "was cancelled by a person"
    if ended.status != dg.DagsterRunStatus.FAILURE:
        return ""
    no_recovery = run_tag(ended, NO_RECOVERY_TAG)
    if no_recovery:
        return f"ended with {no_recovery}"
    for recovery in decide_recoveries(instance, ended, noticed_by="continual training", log=log):
        if isinstance(recovery, dg.SkipReason) and "NoProgress" in str(recovery.skip_message):
            return f"was given up ({recovery.skip_message})"
    return ""


def due_key(spec: JobSpec, found: "Due") -> str:
    """Return the work and its start as a key: a Dagster run that ended well with it needs no successor.

    A head that was restored by a rewind differs from the same head at its commit: the training after it does not count.
    """
    return f"{_purpose(spec, found)}@{found.head or 'start'}.{found.stepped_back}"


def _purpose(spec: JobSpec, found: "Due") -> str:
    """Return the snapshots to train, the last rewind, and the spec and script of the training."""
    from dlac_pipeline.checkpoint.manifest import config_digest  # of the script as well

    digest = blake3((spec.model_dump_json() + config_digest(spec)).encode()).hexdigest(length=16)
    return f"{spec.run}@{','.join(map(str, found.snapshot_ids))}@{found.rewound}@{digest}"
