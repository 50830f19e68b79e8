"""A training run on the tokens: its pinned snapshot, its work plan and its model."""

from assets.sources import OWNERS, tokens
from dlac_pipeline.dagster.assets.planning import build_pinned_snapshot, build_work_plan
from dlac_pipeline.dagster.assets.training import build_model_checkpoint

pinned_snapshot = build_pinned_snapshot(deps=[tokens], owners=OWNERS)
work_plan = build_work_plan(owners=OWNERS)
model_checkpoint = build_model_checkpoint(owners=OWNERS)
