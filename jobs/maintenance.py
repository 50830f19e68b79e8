"""Nightly maintenance of the lakehouse, and alerts. Each schedule and sensor is off until the operator turns it on."""

import dagster as dg

from dlac_pipeline.dagster.maintenance.rehearse import rehearse_job
from dlac_pipeline.dagster.maintenance.upkeep import upkeep_job
from dlac_pipeline.dagster.maintenance.verify import verify_job
from dlac_pipeline.dagster.sensors.alerts import dlac_alerts

ledger_maintenance_schedule = dg.ScheduleDefinition(
    name="ledger_maintenance_schedule",
    job=upkeep_job,
    cron_schedule="17 3 * * *",
    description="Nightly upkeep of the lakehouse. Off until you turn it on.",
)
verify_schedule = dg.ScheduleDefinition(
    name="verify_schedule",
    job=verify_job,
    cron_schedule="41 4 * * *",
    description="Nightly verification of the newest checkpoints. Off until you turn it on.",
)
rehearse_schedule = dg.ScheduleDefinition(
    name="rehearse_schedule",
    job=rehearse_job,
    cron_schedule="23 5 * * *",
    description="Daily rehearsal of each run that trained since the last one. Off until you turn it on.",
)
alerts = dlac_alerts()
