"""The jobs that ingest, train and recover, and the sensors and the schedule that request them."""

import dagster as dg

from assets.sources import corpus, tokens
from assets.training import model_checkpoint, pinned_snapshot, work_plan
from dlac_pipeline.dagster.assets.checks import checkpoint_restorable, consumption_audit
from dlac_pipeline.dagster.components.training_run import build_runs_job
from dlac_pipeline.dagster.sensors.continual import build_continual_schedule, build_new_snapshot_sensor
from dlac_pipeline.dagster.sensors.recovery import build_preemption_sensor, build_recovery_sensor
from dlac_pipeline.dagster.training_runs import NOT_RETRIED, RECOVER_JOB, TRAIN_JOB

ingest_job = dg.define_asset_job(
    "ingest_job",
    selection=dg.AssetSelection.assets(corpus, tokens),
    description="Ingest the standard library's sources and tokenize them.",
)

train_job = dg.define_asset_job(
    TRAIN_JOB,
    selection=dg.AssetSelection.assets(pinned_snapshot, work_plan, model_checkpoint).without_checks()
    | dg.AssetSelection.checks(consumption_audit, checkpoint_restorable),
    description="Pin, plan, train to the end, audit. Launched again for a run that is not finished, it resumes it.",
    tags=NOT_RETRIED,
)
recover_job = dg.define_asset_job(
    RECOVER_JOB,
    selection=dg.AssetSelection.assets(model_checkpoint).without_checks()
    | dg.AssetSelection.checks(consumption_audit, checkpoint_restorable),
    description="Resume a run whose Dagster run died, from its committed ledger. Requested by recovery_sensor.",
    tags=NOT_RETRIED,
)
runs_job = build_runs_job()
recovery_sensor = build_recovery_sensor(recover_job, runs_job)
preemption_sensor = build_preemption_sensor(recover_job, runs_job)
continual_training_schedule = build_continual_schedule(train_job, cron_schedule="*/15 * * * *")
continual_runs_schedule = build_continual_schedule(
    runs_job, cron_schedule="*/15 * * * *", name="continual_runs_schedule"
)
new_snapshot_sensor = build_new_snapshot_sensor(train_job)
runs_snapshot_sensor = build_new_snapshot_sensor(runs_job, name="runs_snapshot_sensor")
