"""The smallest Dagster project with a training run that recovers without a person."""

import dagster as dg

from assets import points, training
from dlac_pipeline.dagster.assets.checks import checkpoint_restorable, consumption_audit
from dlac_pipeline.dagster.maintenance.upkeep import upkeep_job
from dlac_pipeline.dagster.resources import JobResource, LakehouseResource
from dlac_pipeline.dagster.sensors.alerts import dlac_alerts
from dlac_pipeline.dagster.sensors.continual import build_continual_schedule
from dlac_pipeline.dagster.sensors.lost_runs import lost_run_sensor
from dlac_pipeline.dagster.sensors.recovery import build_preemption_sensor, build_recovery_sensor
from dlac_pipeline.dagster.training_runs import NOT_RETRIED, RECOVER_JOB, TRAIN_JOB

checks = dg.AssetSelection.checks(consumption_audit, checkpoint_restorable)
train_job = dg.define_asset_job(
    TRAIN_JOB, selection=dg.AssetSelection.assets(*training).without_checks() | checks, tags=NOT_RETRIED
)
recover_job = dg.define_asset_job(
    RECOVER_JOB, selection=dg.AssetSelection.assets(training[-1]).without_checks() | checks, tags=NOT_RETRIED
)
defs = dg.Definitions(
    assets=[points, *training],
    asset_checks=[consumption_audit, checkpoint_restorable],
    jobs=[train_job, recover_job, upkeep_job],
    schedules=[build_continual_schedule(train_job, cron_schedule="@hourly")],
    sensors=[build_recovery_sensor(recover_job), build_preemption_sensor(recover_job), lost_run_sensor, *dlac_alerts()],
    resources={"job": JobResource.configure_at_launch(), "lakehouse": LakehouseResource()},
    executor=dg.in_process_executor,
)
