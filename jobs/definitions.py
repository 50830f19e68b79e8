"""The only place where everything meets: what workspace.yaml loads."""

from __future__ import annotations

import dagster as dg

from assets.checks import consumption_audit
from assets.planning import pinned_snapshot, work_plan
from assets.resources import JobResource, LakehouseResource
from assets.sources import corpus, tokens
from assets.training import model_checkpoint
from jobs.recovery import recovery_sensor
from jobs.train import ingest_job, recover_job, train_job
from jobs.upkeep import upkeep_job, upkeep_schedule

defs = dg.Definitions(
    assets=[corpus, tokens, pinned_snapshot, work_plan, model_checkpoint],
    asset_checks=[consumption_audit],
    jobs=[ingest_job, train_job, recover_job, upkeep_job],
    schedules=[upkeep_schedule],
    sensors=[recovery_sensor],
    resources={"job": JobResource.configure_at_launch(), "lakehouse": LakehouseResource()},
    executor=dg.in_process_executor,  # the process that Dagster watches is the one that holds the supervisor
)
