"""Dagster components: a training run as assets, what recovers all of them, and an Iceberg table that others write.

`defs.yaml` of a Dagster project names them, for example:

    type: dlac_pipeline.dagster.TrainingRun
    attributes:
      spec_file: job.toml
"""
