"""The only place where everything meets: what workspace.yaml loads.

Each Dagster run imports this module, also a recovery. So assets, ops and sensors import pyiceberg, DuckDB and PyTorch inside
functions (tests/process/test_imports.py).
"""

import dagster as dg

from assets.sources import OWNERS, corpus, tokens
from assets.training import model_checkpoint, pinned_snapshot, work_plan
from catalog import PROFILE
from dlac_pipeline.dagster.assets.checks import checkpoint_restorable, consumption_audit
from dlac_pipeline.dagster.assets.rehearsal import rehearsal_identical
from dlac_pipeline.dagster.components.training_run import build_runs_of
from dlac_pipeline.dagster.maintenance.rehearse import rehearse_job
from dlac_pipeline.dagster.maintenance.upkeep import upkeep_job
from dlac_pipeline.dagster.maintenance.verify import verify_job
from dlac_pipeline.dagster.resources import JobResource, LakehouseResource
from dlac_pipeline.dagster.sensors.continual import job_folder
from dlac_pipeline.dagster.sensors.lost_runs import lost_run_sensor
from dlac_pipeline.dagster.sensors.registration import build_registration_sensor, register_job
from jobs import train
from jobs.maintenance import alerts, ledger_maintenance_schedule, rehearse_schedule, verify_schedule

LAKEHOUSE = LakehouseResource(**PROFILE.model_dump())

defs = dg.Definitions.merge(
    build_runs_of(job_folder(), source_assets={"sources.tokens": "tokens"}, owners=OWNERS),
    dg.Definitions(
        assets=[corpus, tokens, pinned_snapshot, work_plan, model_checkpoint],
        asset_checks=[consumption_audit, checkpoint_restorable, rehearsal_identical],
        jobs=[
            train.ingest_job,
            train.train_job,
            train.recover_job,
            train.runs_job,
            upkeep_job,
            verify_job,
            rehearse_job,
            register_job,
        ],
        schedules=[
            train.continual_training_schedule,
            train.continual_runs_schedule,
            ledger_maintenance_schedule,
            verify_schedule,
            rehearse_schedule,
        ],
        sensors=[
            train.recovery_sensor,
            train.preemption_sensor,
            lost_run_sensor,
            train.new_snapshot_sensor,
            train.runs_snapshot_sensor,
            build_registration_sensor(LAKEHOUSE),
            *alerts,
        ],
        resources={"job": JobResource.configure_at_launch(), "lakehouse": LAKEHOUSE},
        executor=dg.in_process_executor,  # the process that Dagster watches is the one that holds the supervisor
    ),
)
