"""The jobs that ingest and train."""

from __future__ import annotations

import dagster as dg

from assets.sources import corpus, tokens
from assets.training import model_checkpoint, pinned_snapshot, work_plan
from dlac_pipeline.dagster.assets.checks import checkpoint_restorable, consumption_audit
from dlac_pipeline.dagster.coordinator import NOT_RETRIED
from dlac_pipeline.dagster.training_runs import TRAIN_JOB

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
