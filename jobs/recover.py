"""The job that recovers a training run, and the sensors that request it."""

from __future__ import annotations

import dagster as dg

from assets.training import model_checkpoint
from dlac_pipeline.dagster.assets.checks import checkpoint_restorable, consumption_audit
from dlac_pipeline.dagster.coordinator import NOT_RETRIED
from dlac_pipeline.dagster.sensors.recovery import build_preemption_sensor, build_recovery_sensor
from dlac_pipeline.dagster.training_runs import RECOVER_JOB

recover_job = dg.define_asset_job(
    RECOVER_JOB,
    selection=dg.AssetSelection.assets(model_checkpoint).without_checks()
    | dg.AssetSelection.checks(consumption_audit, checkpoint_restorable),
    description="Resume a run whose Dagster run died, from its committed ledger. Requested by recovery_sensor.",
    tags=NOT_RETRIED,
)
recovery_sensor = build_recovery_sensor(recover_job)
preemption_sensor = build_preemption_sensor(recover_job)
