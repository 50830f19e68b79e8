"""From a source table to work units: the pinned snapshot and the plan, as assets."""

from typing import Any

import dagster as dg

from assets.failures import told_to_dagster
from assets.resources import JobResource
from assets.sources import tokens
from catalog.ledger import Ledger
from catalog.snapshots import pin, snapshot_of
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.planner import make_plan


@dg.asset(
    deps=[tokens],
    group_name="training",
    kinds={"iceberg"},
    description="One snapshot of the source table, kept alive by an Iceberg tag: what the run reads, whatever is appended later.",
)
def pinned_snapshot(context: dg.AssetExecutionContext, job: JobResource) -> dg.MaterializeResult[None]:
    """Pin the snapshot that the run was started with; for a new run the one the spec names, or the current one."""
    with told_to_dagster(context):
        spec, lakehouse = job.job_spec(), job.lakehouse()
        legs = Ledger(lakehouse).rows(spec.run, kinds=("leg",))
        wanted = Leg.from_json(legs[-1]["detail"]).snapshot_id if legs else spec.source.snapshot_id
        snapshot = snapshot_of(lakehouse.load(spec.source.table), wanted)
        tag = pin(lakehouse, spec.source.table, snapshot.snapshot_id)
    context.log.info(f"snapshot {snapshot.snapshot_id} of {spec.source.table} is pinned by tag {tag}")
    return dg.MaterializeResult(
        metadata={
            "run": spec.run,
            "table": spec.source.table,
            "snapshot_id": dg.MetadataValue.text(str(snapshot.snapshot_id)),
            "tag": tag,
        }
    )


@dg.asset(
    deps=[pinned_snapshot],
    group_name="training",
    kinds={"iceberg", "parquet"},
    description="One row per work unit (row group) of the pinned snapshot, under a content-addressed plan id.",
)
def work_plan(context: dg.AssetExecutionContext, job: JobResource) -> dg.MaterializeResult[None]:
    """Plan the pinned snapshot."""
    with told_to_dagster(context):
        spec = job.job_spec()
    pinned = metadata_of_this_run(context, pinned_snapshot.key).get("snapshot_id")
    source = spec.source if pinned is None else spec.source.model_copy(update={"snapshot_id": int(pinned)})
    with told_to_dagster(context):
        row = make_plan(job.lakehouse(), source).row
    context.log.info(f"plan {row.plan_id}: {row.units} work units, {row.live_rows} live rows")
    return dg.MaterializeResult(
        metadata={
            "run": spec.run,
            "plan_id": row.plan_id,
            "work_units": row.units,
            "dagster/row_count": row.live_rows,
            "bytes": row.bytes,
            "row_filter": row.row_filter or "(all rows)",
        }
    )


def metadata_of_this_run(context: dg.AssetExecutionContext, key: dg.AssetKey) -> dict[str, Any]:
    """Metadata with which this Dagster run materialized an upstream asset; empty if it did not."""
    entries = context.instance.all_logs(context.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    found = [entry.asset_materialization for entry in entries if entry.asset_materialization]
    mine = [event for event in found if event.asset_key == key]
    return {name: value.value for name, value in mine[-1].metadata.items()} if mine else {}
