"""Lines that the demo shows for the events of its Dagster runs."""

from collections.abc import Iterator

import dagster as dg

from jobs.demo_events import RunEvents, describe, rows_of_plan

CHECKPOINT: dict[str, str | int | float] = {"run": "r", "step": 20, "loss": 5.5, "rows": 5120, "checkpoint_id": "c"}


@dg.asset
def work_plan() -> dg.MaterializeResult[None]:
    """A plan of 1,000 rows."""
    return dg.MaterializeResult(
        metadata={"plan_ids": ["p1"], "dagster/row_count": 1000, "work_units": 4, "bytes": 2_000_000}
    )


@dg.asset(deps=[work_plan], check_specs=[dg.AssetCheckSpec("exact", asset="model_checkpoint")])
def model_checkpoint(
    context: dg.AssetExecutionContext,
) -> Iterator[dg.AssetCheckResult | dg.MaterializeResult[None]]:
    """A training with a checkpoint, a failure and a restart."""
    context.log.info("attempt: attempt 1, step 0, pids [1, 2]")
    context.log_event(dg.AssetObservation(asset_key="model_checkpoint", metadata=CHECKPOINT))
    context.log_event(dg.AssetObservation(asset_key="model_checkpoint", metadata={"interval_s": 3.0}))
    context.log.info("failure: rank 1, cause signal")
    context.log.info("attempt: attempt 2, step 20, pids [3, 4]")
    yield dg.MaterializeResult(metadata={"state": "finished", "step": 40, "loss": 4.25})
    yield dg.AssetCheckResult(passed=False, check_name="exact", description="1 contradiction")


def test_events_become_lines() -> None:
    """Plans, checkpoints, failures, restarts, models and checks are shown once, in their order. Other events are not."""
    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.materialize([work_plan, model_checkpoint], instance=instance)
        events = RunEvents(instance, run.run_id)
        entries = events.read_new()
        assert events.read_new() == []
    assert [line for entry in entries if (line := describe(entry))] == [
        "work plan p1: 1,000 rows in 4 row groups, 2.0 MB",
        "checkpoint of step 20 and the 5,120 rows before it committed, loss 5.5000",
        "the supervisor found a failure: rank 1, cause signal",
        "the supervisor starts the ranks again: attempt 2, step 20, pids [3, 4]",
        "finished at step 40 with loss 4.2500",
        "check exact FAILED: 1 contradiction",
    ]
    assert sum(rows_of_plan(entry) for entry in entries) == 1000
