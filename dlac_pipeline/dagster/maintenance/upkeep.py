"""The job that runs upkeep on DLAC's own tables.

It never changes a source table.
"""

from dataclasses import asdict

import dagster as dg
from pydantic import Field

from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS, MOST_SNAPSHOTS
from dlac_pipeline.spec.spec_problems import Section


class UpkeepConfig(Section, dg.Config):
    """Limits of upkeep."""

    keep_snapshots: int = Field(default=KEEP_SNAPSHOTS, ge=1, le=MOST_SNAPSHOTS)
    """Snapshots to keep of each of DLAC's own tables."""


@dg.op(description="Merges small files, expires snapshots and removes unneeded files of DLAC's own tables.")
def own_tables_in_order(
    context: dg.OpExecutionContext, config: UpkeepConfig, lakehouse: LakehouseResource
) -> dg.Output[None]:
    """A table of what was done, one row per table of DLAC's."""
    from dlac_pipeline.lakehouse.maintenance.upkeep import run_upkeep

    done = run_upkeep(lakehouse.lakehouse(), keep=config.keep_snapshots)
    for each in done:
        if each.busy:
            context.log.warning(f"table {each.table} was too busy to be maintained; the next upkeep continues")
    records = [dg.TableRecord(asdict(each)) for each in done]
    return dg.Output(None, metadata={"done": dg.MetadataValue.table(records)})


@dg.job(description="Upkeep of DLAC's own tables, also during training. It never changes source tables.")
def upkeep_job() -> None:
    """The one op."""
    own_tables_in_order()
