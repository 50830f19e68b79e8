"""Global recovery: when the Dagster run of a training run ends before the training run does, a sensor requests the recovery job.

A run that failed, and one that was cancelled because its machine goes away, are recovered; one that a person cancelled is not.
Runs whose process is gone without a word are made to fail by the sensor in jobs/lost.py, and recovered then.
"""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.failures import NO_RECOVERY_TAG, OUTAGE_TAG, PREEMPTED_TAG, RUN_TAG
from catalog.errors import DlacError, SpecInvalid
from dlac_pipeline.spec import JobSpec, home_folder, parse_spec
from jobs.coordinator import raw_spec_of
from jobs.settings import RecoverySettings, settings_or_defaults
from jobs.train import recover_job, train_job

if TYPE_CHECKING:
    from catalog.ledger import Row, RunState

_HEAD_TAG, _IN_A_ROW_TAG = "dlac/head", "dlac/recoveries_in_a_row"
"""On a recovery run: the head when it was requested, and how many were requested since the head last moved."""
_OUTAGE_SINCE_TAG = "dlac/outage_since"
"""On a recovery run: when catalog or store were first away, in seconds since the epoch, if they have been since then."""
RECOVERS_TAG = "dlac/recovers"
"""On a recovery run: the Dagster run that it goes on for."""


@dg.run_failure_sensor(
    monitored_jobs=[train_job, recover_job],
    request_job=recover_job,
    minimum_interval_seconds=2,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Requests recover_job when a Dagster run that trains has died; leaves failures alone that would come again.",
)
def recovery_sensor(context: dg.RunFailureSensorContext) -> dg.RunRequest | dg.SkipReason:
    """One recovery per dead Dagster run; it replaces the attempt that is current now, unless that one is alive."""
    return recovery_of(context.instance, context.dagster_run, noticed_by="recovery_sensor", log=context.log)


@dg.run_status_sensor(
    run_status=dg.DagsterRunStatus.CANCELED,
    monitored_jobs=[train_job, recover_job],
    request_job=recover_job,
    minimum_interval_seconds=2,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Requests recover_job when a run was cancelled because its machine goes away; not when a person cancelled it.",
)
def preemption_sensor(context: dg.RunStatusSensorContext) -> dg.RunRequest | dg.SkipReason:
    """As `recovery_sensor`, for cancelled runs that carry the tag of preemption."""
    cancelled = context.dagster_run
    if PREEMPTED_TAG not in cancelled.tags:
        return dg.SkipReason(f"run {cancelled.run_id} was cancelled by a person, and is theirs to start again")
    return recovery_of(context.instance, cancelled, noticed_by="preemption_sensor", log=context.log)


def recovery_of(
    instance: dg.DagsterInstance, dead: dg.DagsterRun, *, noticed_by: str, log: logging.Logger
) -> dg.RunRequest | dg.SkipReason:
    """The recovery of a Dagster run that has ended, or why there is none. It only reads: asked twice it says the same."""
    from catalog.connect import connect
    from catalog.ledger import HEAD_KINDS, Ledger

    if NO_RECOVERY_TAG in dead.tags:
        return dg.SkipReason(
            f"run {dead.run_id} ended with {dead.tags[NO_RECOVERY_TAG]}: another attempt would end alike"
        )
    try:
        spec = spec_of(dead.run_config)
    except SpecInvalid as err:
        return dg.SkipReason(f"run {dead.run_id} would fail again: {err}")
    if spec is None:
        return dg.SkipReason(f"run {dead.run_id} has no job configuration: it died before it could train")
    settings, now = settings_or_defaults(log).recovery, time.time()
    outage_since = float(dead.tags.get(_OUTAGE_SINCE_TAG, now)) if OUTAGE_TAG in dead.tags else None
    fruitless = int(dead.tags.get(_IN_A_ROW_TAG, "0"))
    if outage_since is not None and fruitless and now - outage_since < settings.outage_s:
        fruitless -= 1  # the one that has just died of it
    try:
        ledger = Ledger(connect(spec.lakehouse))
        rows, state = ledger.rows(spec.run, kinds=HEAD_KINDS), ledger.state(spec.run)
    except DlacError as err:
        # Dagster will not ask again about this run: what cannot be decided here, the job itself decides, cautiously.
        log.warning(f"the ledger cannot be read, requesting a recovery that fences nobody: {err}")
        launch: dict[str, Any] = {"takeover": False}
        head = dead.tags.get(_HEAD_TAG, "unknown")
    else:
        trainer = _living_trainer(instance, rows, state, settings)
        if trainer:
            return dg.SkipReason(f"{spec.run} is trained by {trainer}: nothing to recover")
        if _progressed(dead, state):
            fruitless = 0
        launch = {"takeover": True, "replaces": state.fence.attempt}
        head = str(state.fence.head)
    if fruitless >= spec.launch.attempts_without_progress:
        return dg.SkipReason(
            f"NoProgress: {fruitless} recoveries in a row of {spec.run} committed nothing; mend the cause"
        )
    launch |= {"wait_s": settings.wait_for_old_launch_s, "noticed_by": noticed_by, "noticed_at": now}
    return dg.RunRequest(
        run_key=dead.run_id,
        run_config={"resources": dead.run_config["resources"], "ops": {"model_checkpoint": {"config": launch}}},
        tags={
            RUN_TAG: spec.run,
            RECOVERS_TAG: dead.run_id,
            _HEAD_TAG: head,
            _IN_A_ROW_TAG: str(fruitless + 1),
            **({} if outage_since is None else {_OUTAGE_SINCE_TAG: str(outage_since)}),
        },
    )


def spec_of(run_config: Mapping[str, Any]) -> JobSpec | None:
    """The job spec in the configuration of a Dagster run, if it has one.

    Raises:
        SpecInvalid: it is not a valid one.
    """
    raw = raw_spec_of(run_config)
    return None if raw is None else parse_spec(dict(raw), origin="the run's configuration").resolved(home_folder())


def _progressed(dead: dg.DagsterRun, state: "RunState") -> bool:
    """Whether a checkpoint was committed since the dead run was requested; a run that was not requested here counts."""
    return _HEAD_TAG not in dead.tags or dead.tags[_HEAD_TAG] != str(state.fence.head)


def _living_trainer(
    instance: dg.DagsterInstance, rows: "list[Row]", state: "RunState", settings: RecoverySettings
) -> str:
    """Who owns the run and is alive: another Dagster run, or a launch of somebody else's; empty: nobody."""
    from dlac_pipeline.recover.coordinator import launcher_of
    from dlac_pipeline.recover.signs import signs_of

    if not state.exists or state.finished:
        return ""
    attempt = state.fence.attempt
    owner = launcher_of(rows, attempt)
    launched = instance.get_run_by_id(owner) if owner else None
    if launched is not None:
        return "" if launched.is_finished else f"Dagster run {owner} (attempt {attempt})"
    alive = signs_of(rows, attempt).alive(lost_after_s=settings.lost_after_s)
    return f"launch {owner or 'by hand'} (attempt {attempt})" if alive else ""
