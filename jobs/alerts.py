"""Alerts about training runs, by Dagster's own sensors: to the log, or as JSON to a command that you name.

`dlac_alerts()` makes them for your own `Definitions`, with a function of yours in the place of the command if you like. The
pattern is that of Dagster's `make_slack_on_run_failure_sensor`. Hooks of a job would run in the process of the run, and say
nothing when that is killed: hence sensors.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import dagster as dg

from assets.failures import NO_RECOVERY_TAG, RUN_TAG, STEPPED_ASIDE_TAG
from catalog.errors import TrainingFailed
from jobs.recovery import RECOVERS_TAG, recovery_of
from jobs.rehearse import rehearse_job
from jobs.settings import read_settings
from jobs.train import recover_job, train_job
from jobs.upkeep import upkeep_job
from jobs.verify import verify_job

Kind = Literal["recovering", "gave_up", "failed", "recovered", "succeeded", "check_failed"]
_TRAINING = (train_job.name, recover_job.name)
_CHECKS_AT_A_TIME = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One thing to tell somebody."""

    kind: Kind
    """recovering: died, and a recovery is requested; gave_up: died, and a person is needed; failed: another job than training."""
    run: str
    """The training run; empty: none."""
    job: str
    dagster_run: str
    message: str
    severity: Literal["info", "warning", "error"]


Send = Callable[[Alert, logging.Logger], None]


def send_by_settings(alert: Alert, log: logging.Logger) -> None:
    """Log an alert, and give it to the command of orchestration.toml if one is named.

    Raises:
        TrainingFailed: the command cannot be run, fails, or takes too long: the sensor's tick says so.
    """
    levels = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    log.log(levels[alert.severity], f"{alert.kind}: {alert.run or alert.job}: {alert.message}")
    settings = read_settings().alerts
    if not settings.command:
        return
    text = json.dumps(asdict(alert))
    try:
        subprocess.run(
            settings.command, input=text, text=True, capture_output=True, timeout=settings.timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError) as err:
        said = getattr(err, "stderr", None)
        raise TrainingFailed(f"expected {settings.command!r} to take an alert, found {err} {said or ''}") from err


def dlac_alerts(
    send: Send = send_by_settings,
    *,
    kinds: Sequence[Kind] = ("recovering", "gave_up", "failed", "recovered", "check_failed"),
    prefix: str = "dlac",
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> list[dg.SensorDefinition]:
    """Sensors that send alerts of these kinds: on runs that failed, on runs that succeeded, and on failed asset checks."""
    watched: list[Any] = [train_job, recover_job, upkeep_job, verify_job, rehearse_job]

    @dg.run_failure_sensor(
        name=f"{prefix}_failure_alerts",
        monitored_jobs=watched,
        default_status=default_status,
        minimum_interval_seconds=5,
        description="Tells of runs that failed: whether they are being recovered, or need a person.",
    )
    def failures(context: dg.RunFailureSensorContext) -> None:
        alert = _of_failure(context)
        if alert.kind in kinds:
            send(alert, context.log)

    @dg.run_status_sensor(
        name=f"{prefix}_success_alerts",
        run_status=dg.DagsterRunStatus.SUCCESS,
        monitored_jobs=watched,
        default_status=default_status,
        minimum_interval_seconds=5,
        description="Tells of training runs that were recovered, and of others that ended well if that is asked for.",
    )
    def successes(context: dg.RunStatusSensorContext) -> None:
        alert = _of_success(context.dagster_run)
        if alert is not None and alert.kind in kinds:
            send(alert, context.log)

    @dg.sensor(
        name=f"{prefix}_check_alerts",
        default_status=default_status,
        minimum_interval_seconds=5,
        description="Tells of asset checks that failed.",
    )
    def checks(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return _look_at_checks(context, send)

    sensors = [failures, successes]
    return [*sensors, checks] if "check_failed" in kinds else sensors


def _of_failure(context: dg.RunFailureSensorContext) -> Alert:
    dead = context.dagster_run
    errors = [event.event_specific_data.error for event in context.get_step_failure_events()]  # type: ignore[union-attr]  # step failures have it
    said = next((str(error.cause or error).strip().splitlines()[0] for error in errors if error), "")
    message = said or context.failure_event.message or "it failed"
    kind: Kind = "failed"
    if dead.job_name in _TRAINING:
        found = recovery_of(context.instance, dead, noticed_by="alerts", log=context.log)
        requested = context.instance.get_runs(dg.RunsFilter(tags={RECOVERS_TAG: dead.run_id}), limit=1)
        heals = bool(requested) or isinstance(found, dg.RunRequest)
        kind = "recovering" if heals else "gave_up"
        if not heals and isinstance(found, dg.SkipReason) and NO_RECOVERY_TAG not in dead.tags:
            message = f"{message} ({found.skip_message})"
    return _alert(dead, kind, message, "warning" if kind == "recovering" else "error")


def _of_success(ended: dg.DagsterRun) -> Alert | None:
    if STEPPED_ASIDE_TAG in ended.tags:
        return None
    if ended.job_name == recover_job.name:
        return _alert(ended, "recovered", f"goes on for Dagster run {ended.tags.get(RECOVERS_TAG, '')}", "info")
    return _alert(ended, "succeeded", "ended well", "info")


def _alert(run: dg.DagsterRun, kind: Kind, message: str, severity: Literal["info", "warning", "error"]) -> Alert:
    return Alert(
        kind=kind,
        run=run.tags.get(RUN_TAG, ""),
        job=run.job_name,
        dagster_run=run.run_id,
        message=message,
        severity=severity,
    )


def _look_at_checks(context: dg.SensorEvaluationContext, send: Send) -> dg.SensorResult:
    """Tell of the checks that failed since the last look; the first look tells of none that were before it."""
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    if context.cursor is None:
        newest = context.instance.get_event_records(dg.EventRecordsFilter(kind), limit=1)
        cursor = str(newest[0].storage_id if newest else 0)
        return dg.SensorResult(skip_reason=dg.SkipReason("tells of checks from now on"), cursor=cursor)
    records = context.instance.get_event_records(
        dg.EventRecordsFilter(kind, after_cursor=int(context.cursor)), limit=_CHECKS_AT_A_TIME, ascending=True
    )
    failed = 0
    for record in records:
        event = record.event_log_entry.dagster_event
        evaluation: Any = None if event is None else event.event_specific_data
        run = context.instance.get_run_by_id(record.run_id)
        if evaluation is None or evaluation.passed or run is None:
            continue
        failed += 1
        severity = "warning" if evaluation.severity == dg.AssetCheckSeverity.WARN else "error"
        message = f"{evaluation.check_name} of {evaluation.asset_key.to_user_string()}: {evaluation.description or ''}"
        send(_alert(run, "check_failed", message, severity), context.log)  # type: ignore[arg-type]  # one of the two
    cursor = str(records[-1].storage_id) if records else context.cursor
    return dg.SensorResult(skip_reason=dg.SkipReason(f"{failed} of {len(records)} checks failed"), cursor=cursor)
