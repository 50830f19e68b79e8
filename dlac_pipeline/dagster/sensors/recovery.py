"""Global recovery: when the Dagster run of a training run ends before the training run does, a sensor requests another one.

It recovers a run that failed, and one that was cancelled because its node is shut down, but none that a person cancelled.
"""

import logging
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import dagster as dg

from dlac_pipeline.dagster import training_runs as runs
from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, OUTAGE_TAG, PREEMPTED_TAG, RUN_TAG, run_tag
from dlac_pipeline.dagster.settings import RecoverySettings, settings_or_defaults
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.ledger.typed_rows import LedgerRow

_HEAD_TAG, _IN_A_ROW_TAG = "dlac/head", "dlac/recoveries_in_a_row"
"""Tag of a recovery run: the head when it was requested, and the number of requests since the head last moved."""
_OUTAGE_SINCE_TAG = "dlac/outage_since"
"""Tag of a recovery run: time since which the catalog or the store is unavailable, in seconds since the epoch."""
RECOVERS_TAG = "dlac/recovers"
"""Tag of a recovery run: the Dagster run that it resumes."""
_PRIORITY_TAG = "dagster/priority"
_PASSED_ON = (_PRIORITY_TAG, "dagster/max_runtime")
"""Dagster's own tags that are passed on. Tags of launchers and people are passed on as well."""
LOADED_WITHIN_S = 120.0
"""Seconds after the end of a run within which the sensor waits for the definition of its asset. Later runs wait as well."""
_DEFERRED_S = 3600.0
"""Seconds after the end of a run for which its recovery is tried in each tick, if it cannot be decided."""
_LONG_S = 600.0
"""A run that lasted longer has trained: where it could not begin, it would have waited for three minutes."""


class RecoveryDeferred(dg.DagsterError):
    """A recovery cannot be requested yet. Only Dagster's own errors fail the tick and leave the cursor of a sensor on runs."""


def build_recovery_sensors(runs_job: runs.TrainingJob) -> list[dg.SensorDefinition]:
    """Return the sensors that request a recovery of each training run of a dead or preempted Dagster run."""
    shared: dict[str, Any] = {
        "monitored_jobs": runs.MONITORED,
        "request_job": runs_job,
        "minimum_interval_seconds": 2,
        "default_status": dg.DefaultSensorStatus.RUNNING,
    }

    recovery_sensor = dg.run_status_sensor(
        name="recovery_sensor",
        run_status=dg.DagsterRunStatus.FAILURE,
        description="Requests a recovery when a Dagster run that trains has died, unless the next one would fail as well.",
        **shared,
    )(_recover)

    @dg.run_status_sensor(
        run_status=dg.DagsterRunStatus.CANCELED,
        description="Requests a recovery when a run was cancelled because its node shuts down, not when a person cancelled it.",
        **shared,
    )
    def preemption_sensor(context: dg.RunStatusSensorContext) -> list[dg.RunRequest] | dg.SkipReason:
        cancelled = context.dagster_run
        if not run_tag(cancelled, PREEMPTED_TAG):
            _let_go_of_pools(context.instance, cancelled, context.log)
            return dg.SkipReason(f"run {cancelled.run_id} was cancelled by a person, and is theirs to start again")
        return _recover(context)

    return [recovery_sensor, preemption_sensor]


def _recover(context: dg.RunStatusSensorContext) -> list[dg.RunRequest] | dg.SkipReason:
    """Return the recoveries of an ended Dagster run, or why it has none. Raise `RecoveryDeferred` if the next tick must try."""
    instance, dead = context.instance, context.dagster_run
    _let_go_of_pools(instance, dead, context.log)
    try:
        found = decide_recoveries(instance, dead, noticed_by=context.sensor_name, log=context.log)
    except RecoveryDeferred:
        raise
    except Exception as err:
        if ended_s_ago(instance, dead) < _DEFERRED_S:
            raise RecoveryDeferred(f"the recovery of run {dead.run_id} cannot be decided yet: {err}") from err
        context.log.exception(f"no recovery of run {dead.run_id} could be decided")
        found = [dg.SkipReason(f"gave up the recovery of run {dead.run_id}: {err}")]
    reasons = "; ".join(str(each.skip_message) for each in found if isinstance(each, dg.SkipReason))
    if reasons:
        with suppress(Exception):  # a note on the page of the run must not keep another run from its recovery
            instance.report_engine_event(f"Not recovered: {reasons}", dead)
    requests = [each for each in found if isinstance(each, dg.RunRequest)]
    return requests or dg.SkipReason(reasons or f"run {dead.run_id} trained nothing")


def decide_recoveries(
    instance: dg.DagsterInstance, dead: dg.DagsterRun, *, noticed_by: str, log: logging.Logger
) -> list[dg.RunRequest | dg.SkipReason]:
    """Return the recovery of each training run of a Dagster run that has ended, or why it has none. It only reads.

    Raise `RecoveryDeferred` if this code location does not define a training run. A new job file may not be loaded yet.
    """
    defined, names = dict(runs.defined_runs), runs.names_of_training(instance, dead)
    missing = [name for name in names if name not in defined]
    if missing and ended_s_ago(instance, dead) < LOADED_WITHIN_S:
        raise RecoveryDeferred(f"expected the training runs {missing} in this code location: reload its definitions")
    found: list[dg.RunRequest | dg.SkipReason] = []
    for name in names:
        if name in missing:
            hint = "; ".join(runs.wrong_job_files) or "reload its definitions, and materialize its model"
            found.append(dg.SkipReason(f"{name} is not defined in this code location: {hint}"))
        elif reason := _reason_against(instance, dead, name, alone=len(names) == 1):
            found.append(dg.SkipReason(reason))
        else:
            run = defined[name].as_launched(dead)
            found.append(_recovery_of(instance, dead, run, noticed_by, log))
    return found


def _reason_against(instance: dg.DagsterInstance, dead: dg.DagsterRun, name: str, *, alone: bool) -> str:
    """Return why a training run, perhaps `alone` in its Dagster run, needs no recovery by that run's events, or nothing."""
    key, no_recovery = runs.model_key(name), run_tag(dead, NO_RECOVERY_TAG)
    if runs.has_made(instance, dead, key):
        return f"run {dead.run_id} ended after it had trained {name}"
    failures = instance.all_logs(dead.run_id, of_type=dg.DagsterEventType.STEP_FAILURE) if no_recovery else ()
    if no_recovery and (alone or key.to_python_identifier() in {entry.step_key for entry in failures}):
        return f"run {dead.run_id} ended with {no_recovery}: another attempt would meet the same error"
    return ""


def ended_s_ago(instance: dg.DagsterInstance, ended: dg.DagsterRun) -> float:
    """Return the seconds since a Dagster run has ended. Infinite: that is unknown."""
    record = instance.get_run_record_by_id(ended.run_id)
    return math.inf if record is None or record.end_time is None else time.time() - record.end_time


def _let_go_of_pools(instance: dg.DagsterInstance, ended: dg.DagsterRun, log: logging.Logger) -> None:
    """Free the slots of a run whose process was killed, or its recovery would wait for them without an end."""
    try:
        instance.event_log_storage.free_concurrency_slots_for_run(ended.run_id)
    except Exception:
        log.exception(f"the pools of run {ended.run_id} are not released: `dagster instance concurrency` shows them")


def _recovery_of(
    instance: dg.DagsterInstance,
    dead: dg.DagsterRun,
    run: runs.TrainingRunDefinition,
    noticed_by: str,
    log: logging.Logger,
) -> dg.RunRequest | dg.SkipReason:
    """Return the recovery of a training run, unless it is given up or another launch trains it."""
    try:
        spec = run.spec_to_recover()
    except SpecInvalid as err:  # a request that Dagster cannot launch would be repeated at every tick
        return dg.SkipReason(f"run {dead.run_id} cannot be launched again: {err}")
    settings = settings_or_defaults(log).recovery
    past = _Past(instance, dead)
    launch: dict[str, Any] = {"takeover": False}
    # Dagster calls this once for a run. If it cannot be decided here, the job itself decides, cautiously.
    try:
        trainer, launch = _find_trainer(instance, spec, past, settings)
    except Exception as err:
        log.warning(f"the trainer is unknown, requesting a recovery that fences no launch: {err}", exc_info=True)
    else:
        if trainer:
            return dg.SkipReason(f"{spec.run} is trained by {trainer}: nothing to recover")
    fruitless = past.fruitless(settings)
    if fruitless >= spec.launch.attempts_without_progress:
        reason = f"NoProgress: {fruitless} recoveries in a row of {spec.run} committed nothing; fix the cause"
        return dg.SkipReason(reason)
    launch |= {"recovers": dead.run_id, "wait_s": settings.wait_for_old_launch_s}
    launch |= {"noticed_by": noticed_by, "noticed_at": past.now}
    return dg.RunRequest(
        run_key=f"{dead.run_id}/{run.name}",
        **run.recovery_request(launch),
        tags={
            _PRIORITY_TAG: "1",  # before runs that have not begun
            **_passed_on(dead),
            RUN_TAG: spec.run,
            RECOVERS_TAG: dead.run_id,
            _HEAD_TAG: past.head,
            _IN_A_ROW_TAG: str(fruitless + 1),
            **({} if past.outage_since is None else {_OUTAGE_SINCE_TAG: str(past.outage_since)}),
        },
    )


class _Past:
    """Results of recoveries before this one, by the dead run's tags, and of the dead run itself."""

    def __init__(self, instance: dg.DagsterInstance, dead: dg.DagsterRun) -> None:
        self.now = time.time()
        self.head = run_tag(dead, _HEAD_TAG) or "unknown"
        """The run's present head. Until it is known, the head when the dead run was requested."""
        self._requested_at_head = run_tag(dead, _HEAD_TAG)
        self._in_a_row = int(run_tag(dead, _IN_A_ROW_TAG) or "0")
        self._away = bool(run_tag(dead, OUTAGE_TAG))
        self._since = float(run_tag(dead, _OUTAGE_SINCE_TAG) or self.now)
        record = instance.get_run_record_by_id(dead.run_id)
        began, ended = (record.start_time, record.end_time) if record else (None, None)
        self._lasted_s = ended - began if began and ended else 0.0
        self._progressed: bool | None = None

    def seen(self, head: str) -> None:
        """The head was looked up. A run that was not requested here counts as one that has committed something."""
        self.head, self._progressed = head, not self._requested_at_head or self._requested_at_head != head

    @property
    def outage_since(self) -> float | None:
        """Return the begin of an outage of catalog or store, if the dead run died of one. It may have trained well before."""
        if not self._away:
            return None
        return self.now if self._trained else self._since

    @property
    def _trained(self) -> bool:
        """Return True if it committed something, or if the ledger is unavailable, if it lasted long enough."""
        return self._lasted_s > _LONG_S if self._progressed is None else self._progressed

    def fruitless(self, settings: RecoverySettings) -> int:
        """Return the consecutive recoveries that committed nothing, without those in an outage that is not too long."""
        if self._trained:
            return 0
        since = self.outage_since
        waits = since is not None and self.now - since < settings.outage_s
        return self._in_a_row - (1 if waits and self._in_a_row else 0)


def _passed_on(dead: dg.DagsterRun) -> dict[str, str]:
    """Tags of the dead run that are not about itself: a launcher's settings, a team, a priority."""
    about_itself = ("dlac/", "dagster/", ".dagster/")
    return {name: value for name, value in dead.tags.items() if name in _PASSED_ON or not name.startswith(about_itself)}


def _find_trainer(
    instance: dg.DagsterInstance, spec: JobSpec, past: _Past, settings: RecoverySettings
) -> tuple[str, dict[str, Any]]:
    """Return the run's trainer (empty: none), and how a recovery takes the run over."""
    from dlac_pipeline.lakehouse.iceberg.connect import connect
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger
    from dlac_pipeline.lakehouse.ledger.run_rows import fence_of_rows
    from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS

    rows = Ledger(connect(spec.lakehouse, tables=spec.own_tables)).rows(spec.run, kinds=HEAD_KINDS)
    trainer = living_trainer(instance, rows, settings)
    # From the same rows that show the trainer, so that an attempt claimed since is not replaced.
    fence = fence_of_rows(rows)
    past.seen(str(fence.head))
    return trainer, {"takeover": True, "replaces": fence.attempt}


def living_trainer(instance: dg.DagsterInstance, rows: "list[LedgerRow]", settings: RecoverySettings) -> str:
    """Return the living owner of the run: another Dagster run, or a launch from elsewhere. Empty: none."""
    from dlac_pipeline.lakehouse.ledger.run_rows import fence_of_rows, finished_of_rows
    from dlac_pipeline.supervise.claims import launcher_of
    from dlac_pipeline.supervise.liveness.launch_liveness import liveness_of

    if not rows or finished_of_rows(rows):
        return ""
    attempt = fence_of_rows(rows).attempt
    owner = launcher_of(rows, attempt)
    launched = instance.get_run_by_id(owner) if owner else None
    if launched is not None:
        return "" if launched.is_finished else f"Dagster run {owner} (attempt {attempt})"
    alive = liveness_of(rows, attempt).alive(lost_after_s=settings.lost_after_s)
    return f"launch {owner or 'by hand'} (attempt {attempt})" if alive else ""
