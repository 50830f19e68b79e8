"""The only place where everything meets: what workspace.yaml loads.

Each Dagster run imports this module, also a recovery. So assets, ops and sensors import pyiceberg, DuckDB and PyTorch inside
functions (tests/process/test_imports.py).
"""

import dagster as dg

from assets.sources import corpus, tokens
from assets.training import model_checkpoint, pinned_snapshot, work_plan
from catalog import PROFILE
from dlac_pipeline.dagster.assets.checks import checkpoint_restorable, consumption_audit
from dlac_pipeline.dagster.assets.rehearsal import rehearsal_identical
from dlac_pipeline.dagster.maintenance.rehearse import rehearse_job
from dlac_pipeline.dagster.maintenance.upkeep import upkeep_job
from dlac_pipeline.dagster.maintenance.verify import verify_job
from dlac_pipeline.dagster.resources import JobResource, LakehouseResource
from dlac_pipeline.dagster.sensors.lost_runs import lost_run_sensor
from jobs import train
from jobs.maintenance import alerts, ledger_maintenance_schedule, rehearse_schedule, verify_schedule

defs = dg.Definitions(
    assets=[corpus, tokens, pinned_snapshot, work_plan, model_checkpoint],
    asset_checks=[consumption_audit, checkpoint_restorable, rehearsal_identical],
    jobs=[train.ingest_job, train.train_job, train.recover_job, upkeep_job, verify_job, rehearse_job],
    schedules=[train.continual_training_schedule, ledger_maintenance_schedule, verify_schedule, rehearse_schedule],
    sensors=[train.recovery_sensor, train.preemption_sensor, lost_run_sensor, train.new_snapshot_sensor, *alerts],
    resources={"job": JobResource.configure_at_launch(), "lakehouse": LakehouseResource(**PROFILE.model_dump())},
    executor=dg.in_process_executor,  # the process that Dagster watches is the one that holds the supervisor
)
