"""Building blocks for a Dagster project, which no other package imports: components, resources, assets, checks, sensors, jobs."""

from dlac_pipeline.dagster.components.recovery import Recovery
from dlac_pipeline.dagster.components.training_run import IcebergTable, TrainingRun

__all__ = ["IcebergTable", "Recovery", "TrainingRun"]
