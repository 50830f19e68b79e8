"""Dagster components: a training run as assets, the recovery of all of them, and an Iceberg table that others write."""
