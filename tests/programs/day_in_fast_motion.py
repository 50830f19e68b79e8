"""DLAC's definitions for a day of minutes: its schedules, due every 15 minutes and every night, are asked every few seconds."""

from __future__ import annotations

import dagster as dg

from dlac_pipeline.dagster.maintenance.upkeep import upkeep_job
from jobs import definitions
from jobs.train import continual_training_schedule, train_job


@dg.sensor(job=train_job, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def continual_training(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
    """What the schedule answers now."""
    now = dg.build_schedule_context(instance=context.instance, repository_def=context.repository_def)
    said = continual_training_schedule.evaluate_tick(now)
    requests = list(said.run_requests or ())
    return requests or dg.SkipReason(said.skip_message)


@dg.sensor(job=upkeep_job, minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def upkeep_by_night(context: dg.SensorEvaluationContext) -> dg.RunRequest:
    """Upkeep of DLAC's own tables, whatever trains."""
    return dg.RunRequest(run_config={"ops": {"own_tables_in_order": {"config": {"keep_snapshots": 5}}}})


defs = dg.Definitions.merge(definitions.defs, dg.Definitions(sensors=[continual_training, upkeep_by_night]))
