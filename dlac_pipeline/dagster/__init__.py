"""Building blocks for a Dagster project: components, resources, assets, checks, sensors and jobs.

No other room imports Dagster.
"""

from dlac_pipeline.dagster.components.iceberg_table import IcebergTable
from dlac_pipeline.dagster.components.recovery import Recovery
from dlac_pipeline.dagster.components.training_run import TrainingRun

__all__ = ["IcebergTable", "Recovery", "TrainingRun"]
