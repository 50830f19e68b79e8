"""Training of followed tables, by the clock or by a new snapshot."""

from __future__ import annotations

from dlac_pipeline.dagster.sensors.continual import build_continual_schedule, build_new_snapshot_sensor
from jobs.train import train_job

continual_training_schedule = build_continual_schedule(train_job, cron_schedule="*/15 * * * *")
new_snapshot_sensor = build_new_snapshot_sensor(train_job)
