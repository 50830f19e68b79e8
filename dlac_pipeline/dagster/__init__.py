"""Building blocks for a Dagster project: components, resources, assets, checks, sensors and jobs.

No other room imports Dagster.
"""

from dlac_pipeline.dagster.component import IcebergTable, Recovery, TrainingRun

__all__ = ["IcebergTable", "Recovery", "TrainingRun"]
