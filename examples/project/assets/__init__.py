"""The source table, and a training run on it."""

import dagster as dg

from catalog import TABLE
from dlac_pipeline.dagster.assets.planning import build_pinned_snapshot, build_work_plan
from dlac_pipeline.dagster.assets.training import build_model_checkpoint

points = dg.AssetSpec(TABLE.split("."))
training = [build_pinned_snapshot(deps=[points]), build_work_plan(), build_model_checkpoint()]
