"""From a source table to work units: the pinned snapshot and the plan, as assets."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from dlac_pipeline.dagster.failures import as_failure
from dlac_pipeline.dagster.resources import Job, JobResource
from dlac_pipeline.dagster.training_runs import PLAN, SNAPSHOT, plan_key
from dlac_pipeline.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.plan.legs.leg import Leg

Deps = Sequence[dg.AssetsDefinition | dg.AssetSpec | dg.AssetKey | str]
"""Assets that another one depends on."""


def build_pinned_snapshot(*, deps: Deps, owners: Sequence[str] | None = None) -> dg.AssetsDefinition:
    """Return the asset `pinned_snapshot`. Its dependencies are the assets of the source tables."""
    return dg.asset(
        _pin_snapshots,
        key=SNAPSHOT,
        deps=deps,
        group_name="training",
        kinds={"iceberg"},
        owners=owners,
        tags={"dlac/stage": "plan"},
        description="One snapshot of the source table, pinned by an Iceberg tag. The run reads it, and no later appends.",
    )


def build_work_plan(*, deps: Deps = (SNAPSHOT,), owners: Sequence[str] | None = None) -> dg.AssetsDefinition:
    """Return the asset `work_plan`."""
    return dg.asset(
        _plan_pinned_snapshots,
        key=PLAN,
        deps=deps,
        group_name="training",
        kinds={"iceberg", "parquet"},
        owners=owners,
        tags={"dlac/stage": "plan"},
        description="One row per work unit (row group) of the pinned snapshot, under a content-addressed plan id.",
    )


def build_run_plan(job: Job, run: str, **attributes: Any) -> dg.AssetsDefinition:
    """Return the asset `plans/<run>`: the pinned snapshots of the sources of a training run, and their work units."""

    def plan_run(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        with as_failure(context):
            pinned = pin_snapshots(context, job)
            planned = plan_snapshots(context, job, pinned)
        return dg.MaterializeResult(metadata={**pinned, **planned})

    return dg.asset(
        plan_run,
        key=plan_key(run),
        description=f"One row per work unit (row group) of the snapshots that training run `{run}` reads. Tags pin them.",
        **attributes,
    )


def _pin_snapshots(context: dg.AssetExecutionContext, job: JobResource) -> dg.MaterializeResult[None]:
    with as_failure(context):
        return dg.MaterializeResult(metadata=pin_snapshots(context, job))


def _plan_pinned_snapshots(context: dg.AssetExecutionContext, job: JobResource) -> dg.MaterializeResult[None]:
    with as_failure(context):
        return dg.MaterializeResult(metadata=plan_snapshots(context, job, metadata_of_this_run(context, SNAPSHOT)))


def pin_snapshots(context: dg.AssetExecutionContext, job: Job) -> dict[str, Any]:
    """Pin the snapshot that the run was started with. For a new run, the one that the spec names, or the current one.

    Return them as metadata.
    """
    from dlac_pipeline.lakehouse.external.mirror import load_version
    from dlac_pipeline.lakehouse.iceberg.pins import hold
    from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of

    spec, lakehouse = job.job_spec(), job.lakehouse()
    committed = _last_leg(lakehouse, spec)
    pins = []
    for index, source in enumerate(spec.sources):
        wanted = committed.sources[index].snapshot_id if committed else source.snapshot_id
        snapshot = snapshot_of(load_version(lakehouse, source.table, wanted), wanted, ref=source.ref)
        tag = hold(lakehouse, source.table, snapshot.snapshot_id, source.pin)
        pins.append((source.table, snapshot.snapshot_id, tag or "(no tag)"))
    for table, snapshot_id, tag in pins:
        context.log.info(f"snapshot {snapshot_id} of {table} is pinned by tag {tag}")
    return {
        "run": spec.run,
        "table": ", ".join(table for table, _, _ in pins),
        "snapshot_id": ", ".join(str(snapshot_id) for _, snapshot_id, _ in pins),
        "tag": ", ".join(tag for _, _, tag in pins),
    }


def plan_snapshots(context: dg.AssetExecutionContext, job: Job, pinned: Mapping[str, Any]) -> dict[str, Any]:
    """Plan the snapshots of `pinned`, or those of the spec if it is empty. A resumed run keeps the plans that its leg binds.

    Return them as metadata.
    """
    from dlac_pipeline.lakehouse.ledger.plans import get_plan
    from dlac_pipeline.plan.legs.choice import plan_sources

    spec, lakehouse = job.job_spec(), job.lakehouse()
    committed = _last_leg(lakehouse, spec)
    if committed is None:
        rows = [plan.row for plan in plan_sources(lakehouse, _with_snapshots(spec, pinned.get("snapshot_id")))]
    else:
        rows = [get_plan(lakehouse, source.plan_id) for source in committed.sources]
    for row in rows:
        context.log.info(f"plan {row.plan_id}: {row.units} work units, {row.live_rows} live rows")
    return {
        "run": spec.run,
        "plan_ids": dg.MetadataValue.json([row.plan_id for row in rows]),
        "is_new": committed is None,
        "work_units": sum(row.units for row in rows),
        "dagster/row_count": sum(row.live_rows for row in rows),
        "bytes": sum(row.bytes for row in rows),
        "row_filter": ", ".join(row.row_filter or "(all rows)" for row in rows),
    }


def _with_snapshots(spec: JobSpec, pinned: str | None) -> JobSpec:
    if pinned is None:
        return spec
    snapshots = zip(spec.sources, pinned.split(", "), strict=True)
    return spec.with_sources([source.model_copy(update={"snapshot_id": int(part)}) for source, part in snapshots])


def _last_leg(lakehouse: "Lakehouse", spec: JobSpec) -> "Leg | None":
    """Return the leg of the run's head, whose sources are those of the spec, or None without a checkpoint.

    Raises:
        ResumeMismatch: the spec has another number of sources.
    """
    from dlac_pipeline.lakehouse.ledger.ledger import Ledger
    from dlac_pipeline.lakehouse.ledger.run_rows import fence_of_rows
    from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
    from dlac_pipeline.plan.legs.choice import check_sources
    from dlac_pipeline.supervise.choose_leg import leg_of

    rows = Ledger(lakehouse).rows(spec.run, kinds=HEAD_KINDS)
    head = fence_of_rows(rows).head
    if head is None:
        return None
    leg = leg_of(rows, head)
    check_sources(spec, leg)
    return leg


def metadata_of_this_run(context: dg.AssetExecutionContext, key: dg.AssetKey) -> dict[str, Any]:
    """Return the metadata with which this Dagster run materialized an upstream asset. Empty if it did not."""
    entries = context.instance.all_logs(context.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    found = [entry.asset_materialization for entry in entries if entry.asset_materialization]
    mine = [event for event in found if event.asset_key == key]
    return {name: value.value for name, value in mine[-1].metadata.items()} if mine else {}
