"""Building blocks for a Dagster project: resources, assets, checks, sensors and jobs. No other room imports Dagster."""
