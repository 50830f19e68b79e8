"""Sensor that finds, by heartbeats, Dagster runs whose process is gone, and marks them as ended: recovery.py decides the rest."""

import importlib
import json
import socket
import time
from pathlib import Path

import dagster as dg

from dlac_pipeline.dagster.heartbeat import RunHeartbeat, beats_of
from dlac_pipeline.dagster.settings import RecoverySettings, settings_or_defaults
from dlac_pipeline.dagster.training_runs import names_of_training
from dlac_pipeline.elastic.ranks.processes import is_running

_WAITED_FOR = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
_LOOK_EVERY_S, _COUNTED_S = 5, 30.0
"""Most of the time between two looks that counts as silence. In a longer pause the sensor or Dagster's storage was down."""
_LAUNCHED_BY_TAG = ".dagster/grpc_info"
"""Set by Dagster's default launcher: the address of the code server that starts the run's process."""


@dg.sensor(
    minimum_interval_seconds=_LOOK_EVERY_S,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Fails Dagster runs that train and whose process has ended, for example with its code server or its node.",
)
def lost_run_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
    """Compare each run's heartbeat with the cursor, which has the newest one, and for how long it was that while looked at."""
    settings, now = settings_or_defaults(context.log).recovery, time.time()
    mine = context.code_location_origin
    location = None if mine is None else mine.location_name
    waited_for = context.instance.get_runs(dg.RunsFilter(statuses=_WAITED_FOR))
    runs = [run for run in waited_for if _location_of(run) == location and names_of_training(context.instance, run)]
    if runs:  # during training, because each code server is new and `recovery_sensor` must decide at once
        importlib.import_module("dlac_pipeline.supervise.start.start_attempt")
    beats = beats_of(context.instance, [run.run_id for run in runs])
    state = json.loads(context.cursor or "{}")
    before = state.get("seen", {})
    passed_s = min(max(now - state.get("looked_at", 0.0), 0.0), _COUNTED_S)
    seen, lost = {}, []
    for run in runs:
        beat = beats.get(run.run_id)
        mark = beat.mark if beat else ""
        known, silent_before_s = before.get(run.run_id, (None, 0.0))
        silent_s = silent_before_s + passed_s if known == mark else 0.0
        seen[run.run_id] = (mark, silent_s)
        if beat is None:
            reason = _lost_early(context.instance, run, silent_s, settings)
        else:
            reason = _reason_lost(beat, silent_s, settings)
        if reason and _end(context.instance, run, reason):
            lost.append(f"run {run.run_id}: {reason}")
    message = "; ".join(lost) or f"all {len(runs)} runs that train are alive"
    return dg.SensorResult(skip_reason=dg.SkipReason(message), cursor=json.dumps({"looked_at": now, "seen": seen}))


def _location_of(run: dg.DagsterRun) -> str | None:
    """Return the code location of a run. Others may have assets and jobs of the same names."""
    origin = run.remote_job_origin
    return None if origin is None else origin.repository_origin.code_location_origin.location_name


def _reason_lost(beat: RunHeartbeat, silent_s: float, settings: RecoverySettings) -> str:
    """Return why a run that has been silent for so long is lost. Empty: it is not."""
    if beat.is_here and beat.is_gone and silent_s >= settings.gone_after_s:
        return f"its process {beat.pid} is gone"
    if silent_s < settings.lost_after_s:
        return ""
    return f"its process {beat.pid} on {beat.machine.split()[0]} sent no heartbeat for {silent_s:.0f} s"


def _lost_early(instance: dg.DagsterInstance, run: dg.DagsterRun, silent_s: float, settings: RecoverySettings) -> str:
    """Return why a run without a heartbeat will never have one: its starter here, or its process, is gone. Empty: it may."""
    if silent_s < settings.gone_after_s:
        return ""
    pid, since = _started_here(instance, run)
    if pid and not is_running(pid, started_by=since):
        return f"its process {pid} is gone, and sent no heartbeat"
    if not pid and (server := _server_here(run)) and not _answers(server):
        return "it was not started, and the code server that was to start it is gone"
    # An existing process may take long to import on a busy node, and cannot be distinguished from one that hangs.
    patience_s = max(settings.lost_after_s, settings.start_within_s if pid else 0.0)
    return f"it sent no heartbeat in {silent_s:.0f} s" if silent_s >= patience_s else ""


def _started_here(instance: dg.DagsterInstance, run: dg.DagsterRun) -> tuple[int, float]:
    """Return the process that a code server of this node started for a run, and the moment. 0: none is known."""
    if not _server_here(run):
        return 0, 0.0  # launched by another node, or by other means
    for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        metadata = {} if entry.dagster_event is None else entry.dagster_event.engine_event_data.metadata
        if "pid" in metadata:
            return int(str(metadata["pid"].value)), entry.timestamp
    return 0, 0.0


def _server_here(run: dg.DagsterRun) -> str:
    """Return the socket of the code server for a run. Empty: it is not on this node."""
    server = str(json.loads(run.tags.get(_LAUNCHED_BY_TAG, "{}")).get("socket") or "")
    return server if server and Path(server).exists() else ""


def _answers(server: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(server) == 0


def _end(instance: dg.DagsterInstance, run: dg.DagsterRun, reason: str) -> bool:
    """Report the end of a run: as a failure, which is recovered, or as the cancellation that was requested."""
    now = instance.get_run_by_id(run.run_id)
    if now is None or now.is_finished:
        return False
    if now.status == dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(now, message=f"Cancelled; {reason}")
    else:
        instance.report_run_failed(now, message=f"Lost: {reason}")
    return True
