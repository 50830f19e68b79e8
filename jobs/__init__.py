"""Dagster jobs, sensors, schedules and definitions, and the demo."""
