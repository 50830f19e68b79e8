"""From source tables to work units: the pinned snapshots of a training run and their plans, as one asset."""

from typing import TYPE_CHECKING, Any

import dagster as dg

from dlac_pipeline.dagster.failures import as_failure
from dlac_pipeline.dagster.training_runs import TrainingRunDefinition, plan_key
from dlac_pipeline.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.plan.legs.leg import Leg


def build_plan(run: TrainingRunDefinition, **attributes: Any) -> dg.AssetsDefinition:
    """Return the asset `plans/<run>`: the pinned snapshots of the sources of a training run, and their work units."""

    def plan_run(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        with as_failure(context):
            return dg.MaterializeResult(metadata=_plan(context, run))

    return dg.asset(
        plan_run,
        key=plan_key(run.name),
        description=f"One row per work unit (row group) of the snapshots that training run `{run.name}` reads. "
        "Tags pin them.",
        **attributes,
    )


def _plan(context: dg.AssetExecutionContext, run: TrainingRunDefinition) -> dict[str, Any]:
    """Pin and plan the snapshots of a new run. One that has begun keeps the plans of its leg. Return them as metadata."""
    from dlac_pipeline.lakehouse.ledger.plans import get_plan
    from dlac_pipeline.plan.legs.choice import plan_sources

    spec, lakehouse = run.job_spec(), run.lakehouse()
    committed = _last_leg(lakehouse, spec)
    if committed is None:
        plans = [plan.row for plan in plan_sources(lakehouse, spec)]
    else:
        plans = [get_plan(lakehouse, source.plan_id) for source in committed.sources]
    for plan in plans:
        context.log.info(
            f"plan {plan.plan_id}: {plan.units} work units, {plan.live_rows} live rows of snapshot {plan.snapshot_id} of "
            f"{plan.source_table}, pinned by tag {plan.tag or '(no tag)'}"
        )
    return {
        "run": spec.run,
        "table": ", ".join(source.table for source in spec.sources),
        "snapshot_id": ", ".join(str(plan.snapshot_id) for plan in plans),
        "tag": ", ".join(plan.tag or "(no tag)" for plan in plans),
        "plan_ids": dg.MetadataValue.json([plan.plan_id for plan in plans]),
        "is_new": committed is None,
        "work_units": sum(plan.units for plan in plans),
        "dagster/row_count": sum(plan.live_rows for plan in plans),
        "bytes": sum(plan.bytes for plan in plans),
        "row_filter": ", ".join(plan.row_filter or "(all rows)" for plan in plans),
    }


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


def new_plan_ids(context: dg.AssetExecutionContext, run: str) -> tuple[str, ...]:
    """Return the plans that this Dagster run has made for a run that has not begun. Empty without them."""
    entries = context.instance.all_logs(context.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    found = [entry.asset_materialization for entry in entries if entry.asset_materialization]
    made = [
        {name: each.value for name, each in event.metadata.items()}
        for event in found
        if event.asset_key == plan_key(run)
    ]
    return tuple(made[-1]["plan_ids"]) if made and made[-1]["is_new"] else ()
