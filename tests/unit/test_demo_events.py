"""Lines that the demo shows for the events of its Dagster runs."""

from collections.abc import Iterator

import dagster as dg

from examples.demo.events import RunEvents, describe, rows_of_plan

MODEL = dg.AssetKey(["models", "r"])
CHECKPOINT: dict[str, str | int | float] = {"run": "r", "step": 20, "loss": 5.5, "rows": 5120, "checkpoint_id": "c"}


@dg.asset(key=["plans", "r"])
def work_plan() -> dg.MaterializeResult[None]:
    """Return a plan of 1,000 rows."""
    return dg.MaterializeResult(
        metadata={
            "table": "src.t",
            "snapshot_id": "7",
            "plan_ids": ["p1"],
            "dagster/row_count": 1000,
            "work_units": 4,
            "bytes": 2_000_000,
        }
    )


@dg.asset(key=MODEL, deps=[work_plan], check_specs=[dg.AssetCheckSpec("exact", asset=MODEL)])
def model_checkpoint(
    context: dg.AssetExecutionContext,
) -> Iterator[dg.AssetCheckResult | dg.MaterializeResult[None]]:
    """Return a training with a checkpoint, a failure and a restart."""
    context.log.info("attempt: attempt 1, step 0, pids [1, 2]")
    context.log_event(dg.AssetObservation(asset_key=MODEL, metadata=CHECKPOINT))
    context.log_event(dg.AssetObservation(asset_key=MODEL, metadata={"interval_s": 3.0}))
    context.log.info("failure: rank 1, cause signal")
    context.log.info("attempt: attempt 2, step 20, pids [3, 4]")
    yield dg.MaterializeResult(metadata={"state": "finished", "step": 40, "loss": 4.25})
    yield dg.AssetCheckResult(passed=False, check_name="exact", description="1 contradiction")


def test_events_become_lines() -> None:
    """Plans, checkpoints, failures, restarts, models and checks are shown once, in order. Other events are not shown."""
    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.materialize([work_plan, model_checkpoint], instance=instance)
        events = RunEvents(instance, run.run_id)
        entries = events.read_new()
        assert events.read_new() == []
    assert [line for entry in entries if (line := describe(entry))] == [
        "snapshot 7 of src.t is pinned. Work plan p1: 1,000 rows in 4 row groups, 2.0 MB",
        "checkpoint of step 20 and the 5,120 rows before it committed, loss 5.5000",
        "the supervisor found a failure: rank 1, cause signal",
        "the supervisor starts the ranks again: attempt 2, step 20, pids [3, 4]",
        "finished at step 40 with loss 4.2500",
        "check exact FAILED: 1 contradiction",
    ]
    assert sum(rows_of_plan(entry) for entry in entries) == 1000
