"""The jobs that ingest, train, and recover."""

from __future__ import annotations

import dagster as dg

from assets.sources import corpus, tokens
from dlac_pipeline.dagster.assets.checks import checkpoint_restorable, consumption_audit
from dlac_pipeline.dagster.assets.planning import pinned_snapshot, work_plan
from dlac_pipeline.dagster.assets.training import model_checkpoint
from dlac_pipeline.dagster.coordinator import NOT_RETRIED
from dlac_pipeline.dagster.training_runs import MATERIALIZE

ingest_job = dg.define_asset_job(
    "ingest_job",
    selection=dg.AssetSelection.assets(corpus, tokens),
    description="Ingest the standard library's sources and tokenize them.",
)

train_job = dg.define_asset_job(
    "train_job",
    selection=dg.AssetSelection.assets(pinned_snapshot, work_plan, model_checkpoint).without_checks()
    | dg.AssetSelection.checks(consumption_audit, checkpoint_restorable),
    description="Pin, plan, train to the end, audit. Launched again for a run that is not finished, it resumes it.",
    tags=NOT_RETRIED,
)

recover_job = dg.define_asset_job(
    "recover_job",
    selection=dg.AssetSelection.assets(model_checkpoint).without_checks()
    | dg.AssetSelection.checks(consumption_audit, checkpoint_restorable),
    description="Resume a run whose Dagster run died, from its committed ledger. Requested by recovery_sensor.",
    tags=NOT_RETRIED,
)

MONITORED = [train_job, recover_job, dg.define_asset_job(MATERIALIZE)]
"""The jobs whose runs may train, for sensors on the ends of runs. The last is Dagster's own, of which only the name is used."""
