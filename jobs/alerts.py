"""Alerts about training runs, maintenance and checks: to the log, or to the command of orchestration.toml."""

from __future__ import annotations

from dlac_pipeline.dagster.sensors.alerts import dlac_alerts

alerts = dlac_alerts()
