"""Component of an Iceberg table that other programs write."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from dlac_pipeline.dagster.training_runs import table_key
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.spec.job_spec import home_folder


class IcebergTable(dg.Component, dg.Model, dg.Resolvable):
    """A source table that other programs write, as an observed asset. Its data version is the current snapshot."""

    table: str = Field(description="Name of the table, as namespace.table.")
    lakehouse: Mapping[str, Any] = Field(default={}, description="Settings of the lakehouse, as in a job spec.")
    group_name: str = Field(default="sources", description="Group of the asset.")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the asset, and the sensor that observes it each minute."""
        key = table_key(self.table)

        def observe() -> dg.DataVersion:
            from dlac_pipeline.lakehouse.iceberg.connect import connect

            lakehouse = connect(LakehouseConfig.model_validate(self.lakehouse).at_home(home_folder()))
            current = lakehouse.load(self.table).current_snapshot()
            return dg.DataVersion("empty" if current is None else str(current.snapshot_id))

        asset = dg.observable_source_asset(
            key=key,
            group_name=self.group_name,
            description=f"One row per row of the Iceberg table {self.table}. Its data version is the snapshot.",
            automation_condition=dg.AutomationCondition.cron_tick_passed("* * * * *")
            & ~dg.AutomationCondition.in_progress(),
        )(observe)
        sensor = dg.AutomationConditionSensorDefinition(
            name=f"{key.to_python_identifier()}_observation",
            target=dg.AssetSelection.assets(key),
            default_status=dg.DefaultSensorStatus.RUNNING,
            description=f"Looks at the snapshot of {self.table} each minute.",
        )
        return dg.Definitions(assets=[asset], sensors=[sensor])
