"""Component that recovers all training runs of a code location, and maintains their lakehouse."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from dlac_pipeline.dagster import maintenance
from dlac_pipeline.dagster.components.training_run import build_runs_job
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.dagster.sensors import alerts, continual, lost_runs, recovery
from dlac_pipeline.lakehouse.errors import SpecInvalid

_MAINTENANCE = {"upkeep_job": "17 3 * * *", "verify_job": "41 4 * * *", "rehearse_job": "23 5 * * *"}


class Recovery(dg.Component, dg.Model, dg.Resolvable):
    """Recovery of all training runs of a code location, alerts about them, and upkeep of their lakehouse. A location has one."""

    lakehouse: Mapping[str, Any] = Field(default={}, description="Settings of the lakehouse, as in a job spec.")
    continual_cron: str = Field(default="*/15 * * * *", description="When runs that follow appends are looked at.")
    maintenance: Mapping[str, str] = Field(
        default={},
        description=f"Cron schedules of maintenance jobs by name, in place of {_MAINTENANCE}. All are off at first.",
    )

    def build_defs(self, context: dg.ComponentLoadContext | None = None) -> dg.Definitions:
        """Return jobs, schedules and sensors. They need no `context`, so a project without `defs.yaml` can call this."""
        jobs = {job.name: job for job in (maintenance.upkeep_job, maintenance.verify_job, maintenance.rehearse_job)}
        if unknown := sorted(set(self.maintenance) - set(jobs)):
            raise SpecInvalid(f"expected maintenance jobs among {sorted(jobs)}, found {unknown}")
        schedules = [
            dg.ScheduleDefinition(name=f"{name}_schedule", job=jobs[name], cron_schedule=cron)
            for name, cron in {**_MAINTENANCE, **self.maintenance}.items()
        ]
        runs_job, lakehouse = build_runs_job(), LakehouseResource(**self.lakehouse)
        return dg.Definitions(
            jobs=[runs_job, maintenance.register_job, *jobs.values()],
            schedules=[*schedules, continual.build_continual_schedule(runs_job, cron_schedule=self.continual_cron)],
            sensors=[
                *recovery.build_recovery_sensors(runs_job),
                lost_runs.lost_run_sensor,
                continual.build_new_snapshot_sensor(runs_job),
                maintenance.build_registration_sensor(lakehouse),
                *alerts.dlac_alerts(),
            ],
            resources={"lakehouse": lakehouse},
        )
