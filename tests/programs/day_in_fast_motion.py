"""DLAC's definitions for an accelerated day: schedules of every 15 minutes and every night are evaluated every few seconds."""

import dagster as dg

from dlac_pipeline.dagster.maintenance import upkeep_job
from dlac_pipeline.dagster.training_runs import RUNS_JOB
from jobs import definitions


@dg.sensor(job_name=RUNS_JOB, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def continual_training(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
    """Return the schedule's requests of the current time."""
    repository = context.repository_def
    assert repository is not None
    now = dg.build_schedule_context(instance=context.instance, repository_def=repository)
    tick = repository.get_schedule_def("continual_training_schedule").evaluate_tick(now)
    requests = list(tick.run_requests or ())
    return requests or dg.SkipReason(tick.skip_message)


@dg.sensor(job=upkeep_job, minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def upkeep_by_night(context: dg.SensorEvaluationContext) -> dg.RunRequest:
    """Request upkeep of DLAC's own tables, during training too."""
    return dg.RunRequest(run_config={"ops": {"own_tables_in_order": {"config": {"keep_snapshots": 5}}}})


defs = dg.Definitions.merge(definitions.defs, dg.Definitions(sensors=[continual_training, upkeep_by_night]))
