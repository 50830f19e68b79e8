"""Alerts about DLAC's runs, by Dagster's own sensors: to the log, or as JSON to a command that you name.

Hooks would run in the process of the run, and are silent when that is killed: hence sensors. Each tick sends at most one alert,
about one ended run, or fails and is repeated as a whole. No alert is lost, and none is sent twice.
"""

import json
import logging
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import dagster as dg

from dlac_pipeline.dagster.failures import NO_RECOVERY_TAG, STEPPED_ASIDE_TAG, run_tag
from dlac_pipeline.dagster.maintenance import rehearse_job, upkeep_job, verify_job
from dlac_pipeline.dagster.sensors.recovery import RECOVERS_TAG, decide_recoveries, ended_s_ago
from dlac_pipeline.dagster.settings import read_settings
from dlac_pipeline.dagster.training_runs import MONITORED, names_of_training
from dlac_pipeline.lakehouse.errors import RunBusy, TrainingFailed

Kind = Literal["recovering", "gave_up", "failed", "recovered", "succeeded", "check_failed"]
Severity = Literal["info", "warning", "error"]
_BESIDE_TRAINING = (upkeep_job, verify_job, rehearse_job)
HELD_S = 3600.0
"""Seconds after the end of its run during which a refused alert is tried in each tick. Later alerts wait."""


class AlertUnsent(dg.DagsterError):
    """An alert could not be sent yet. Of all errors only Dagster's own fail the tick and leave the cursor of a sensor on runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One alert."""

    kind: Kind
    """recovering: died, a recovery is requested. gave_up: died, a person is needed. failed: another job than training."""
    run: str
    """The training run, or empty."""
    job: str
    dagster_run: str
    message: str
    severity: Severity


Send = Callable[[Alert, logging.Logger], None]


def send_by_settings(alert: Alert, log: logging.Logger) -> None:
    """Log an alert, and give it to the command of orchestration.toml. Raise `SpecInvalid` or `TrainingFailed` if that fails."""
    levels = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    log.log(levels[alert.severity], f"{alert.kind}: {alert.run or alert.job}: {alert.message}")
    settings = read_settings().alerts
    if not settings.command:
        return
    text, most_s = json.dumps(asdict(alert)), settings.timeout_s
    try:
        subprocess.run(settings.command, input=text, text=True, capture_output=True, timeout=most_s, check=True)
    except (OSError, subprocess.SubprocessError) as err:
        output = getattr(err, "stderr", None)
        raise TrainingFailed(f"expected {settings.command!r} to take an alert, found {err} {output or ''}") from err


def dlac_alerts(
    send: Send = send_by_settings,
    *,
    kinds: Sequence[Kind] = ("recovering", "gave_up", "failed", "recovered", "check_failed"),
    prefix: str = "dlac",
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> list[dg.SensorDefinition]:
    """Sensors that send alerts of these kinds: on runs that failed, on runs that succeeded, and on the checks of either.

    They look at DLAC's jobs, and at what *Materialize* launches if it trains. What `send` raises means that the alert was not
    taken: it is called again.
    """

    def sensor(
        name: str, status: dg.DagsterRunStatus, alert_of: Callable[[dg.RunStatusSensorContext], Alert | None], text: str
    ) -> dg.SensorDefinition:
        return dg.run_status_sensor(
            name=f"{prefix}_{name}",
            run_status=status,
            monitored_jobs=[*MONITORED, *_BESIDE_TRAINING],
            default_status=default_status,
            minimum_interval_seconds=5,
            description=text,
        )(lambda context: _send_alert(context, alert_of, kinds, send))

    failed, succeeded = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS
    sensors = [
        sensor("failure_alerts", failed, _of_failure, "Reports failed runs that are being recovered or need a person."),
        sensor("success_alerts", succeeded, _of_success, "Reports recovered training runs, and others on request."),
    ]
    if "check_failed" in kinds:
        text = "Reports the asset checks that failed in runs that"
        sensors += [
            sensor("check_alerts", succeeded, _of_checks, f"{text} succeeded."),
            sensor("failed_run_check_alerts", failed, _of_checks, f"{text} failed."),
        ]
    return sensors


def _send_alert(
    context: dg.RunStatusSensorContext,
    alert_of: Callable[[dg.RunStatusSensorContext], Alert | None],
    kinds: Sequence[Kind],
    send: Send,
) -> dg.SkipReason:
    """Send the alert about an ended run, if it needs one. Raise `AlertUnsent` if it was refused: the next tick tries again."""
    run = context.dagster_run
    if not (run.job_name in [job.name for job in _BESIDE_TRAINING] or names_of_training(context.instance, run)):
        return dg.SkipReason(f"run {run.run_id} of {run.job_name} does not train")
    try:
        alert = alert_of(context)
        if alert is None or alert.kind not in kinds:
            return dg.SkipReason(f"there is no alert about run {run.run_id}")
        send(alert, context.log)
    except Exception as err:
        if ended_s_ago(context.instance, run) < HELD_S:
            text = f"run {run.run_id} is tried again at the next tick, and later runs wait for it: {err}"
            raise AlertUnsent(text) from err
        context.log.exception(f"no alert about run {run.run_id} could be sent")
        return dg.SkipReason(f"gave up the alert about run {run.run_id}: {err}")
    return dg.SkipReason(f"sent an alert about run {run.run_id}: {alert.kind}")


def _of_failure(context: dg.RunStatusSensorContext) -> Alert | None:
    dead, failed = context.dagster_run, context.for_run_failure()
    errors = [event.event_specific_data.error for event in failed.get_step_failure_events()]  # type: ignore[union-attr]  # step failures have it
    first = next((str(error.cause or error).strip().splitlines()[0] for error in errors if error), "")
    message = first or failed.failure_event.message or "it failed"
    instance = context.instance
    found = decide_recoveries(instance, dead, noticed_by="alerts", log=context.log)
    if not found:
        return _alert(context, "failed", message, "error")
    requested = instance.get_runs(dg.RunsFilter(tags={RECOVERS_TAG: dead.run_id}), limit=1)
    if requested or any(isinstance(each, dg.RunRequest) for each in found):
        return _alert(context, "recovering", message, "warning")
    if run_tag(dead, NO_RECOVERY_TAG) == RunBusy.__name__ and len(found) == 1:
        return None  # it was refused, because another launch trains
    if not run_tag(dead, NO_RECOVERY_TAG):
        reasons = "; ".join(str(each.skip_message) for each in found if isinstance(each, dg.SkipReason))
        message = f"{message} ({reasons})"
    return _alert(context, "gave_up", message, "error")


def _of_success(context: dg.RunStatusSensorContext) -> Alert | None:
    ended = context.dagster_run
    if run_tag(ended, STEPPED_ASIDE_TAG):
        return None
    if RECOVERS_TAG in ended.tags:
        before = run_tag(ended, RECOVERS_TAG) or ended.parent_run_id
        return _alert(context, "recovered", f"resumes Dagster run {before}", "info")
    return _alert(context, "succeeded", "ended well", "info")


def _of_checks(context: dg.RunStatusSensorContext) -> Alert | None:
    """Return one alert for all failed checks of a run, by its log: Dagster's default storage has a database for each run."""
    entries = context.instance.all_logs(context.dagster_run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    answers: list[Any] = [entry.dagster_event.event_specific_data for entry in entries if entry.dagster_event]
    last = {(answer.asset_key, answer.check_name): answer for answer in answers}  # of a step that was tried again
    failed = [answer for answer in last.values() if not answer.passed]
    if not failed:
        return None
    problems = [
        f"{each.check_name} of {each.asset_key.to_user_string()}: {each.description or 'it does not hold'}"
        for each in failed
    ]
    error = any(each.severity == dg.AssetCheckSeverity.ERROR for each in failed)
    return _alert(context, "check_failed", "; ".join(problems), "error" if error else "warning")


def _alert(context: dg.RunStatusSensorContext, kind: Kind, message: str, severity: Severity) -> Alert:
    run = context.dagster_run
    names = ", ".join(names_of_training(context.instance, run))
    return Alert(kind=kind, run=names, job=run.job_name, dagster_run=run.run_id, message=message, severity=severity)
