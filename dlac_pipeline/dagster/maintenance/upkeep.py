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

    keep_snapshots: int = Field(
        default=KEEP_SNAPSHOTS, ge=1, le=MOST_SNAPSHOTS, description="Snapshots to keep of each of DLAC's own tables."
    )


@dg.op(description="Merges small files, expires snapshots and removes files that nothing names, in DLAC's own tables.")
def own_tables_in_order(
    context: dg.OpExecutionContext, config: UpkeepConfig, lakehouse: LakehouseResource
) -> dg.Output[None]:
    """A table of what was done, one row per table of DLAC's."""
    from dlac_pipeline.lakehouse.maintenance.upkeep import run_upkeep

    done = run_upkeep(lakehouse.lakehouse(), keep=config.keep_snapshots)
    for each in done:
        if each.busy:
            context.log.warning(f"table {each.table} was too busy to be put in order; the next upkeep goes on")
    records = [dg.TableRecord(asdict(each)) for each in done]
    return dg.Output(None, metadata={"done": dg.MetadataValue.table(records)})


@dg.job(description="Puts DLAC's own tables in order, beside whatever trains. Source tables are never touched.")
def upkeep_job() -> None:
    """The one op."""
    own_tables_in_order()
