"""Sensors and schedules on training runs: recovery, lost runs, continual training, alerts."""
