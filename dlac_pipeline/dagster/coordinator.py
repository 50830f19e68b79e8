"""Dagster's run queue, which lets a training run have one trainer at a time: named in dagster.yaml as the run coordinator."""

import dagster as dg
from dagster import QueuedRunCoordinator, SubmitRunContext

from dlac_pipeline.dagster.failures import RUN_TAG
from dlac_pipeline.dagster.training_runs import training_run_of, trains

NOT_RETRIED = {"dagster/max_retries": "0"}
"""Recovery has one owner: an instance whose `run_retries` are on starts runs with this tag no second time beside it."""


class TrainingRunCoordinator(QueuedRunCoordinator):
    """Run coordinator that tags a training Dagster run with the name of its training run before it is queued.

    By that tag the queue's `tag_concurrency_limits` hold back a second trainer of the same training run. It is a courtesy, as
    the run's lock is: safety depends on the fence. A launch by *Materialize* in the UI has no job's tags, so the coordinator
    also sets that Dagster retries none of these runs.
    """

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        """Tag and enqueue."""
        run = context.dagster_run
        if trains(run):
            name = training_run_of(run)
            tags = {**NOT_RETRIED, **({RUN_TAG: name} if name else {})}
            missing = {key: value for key, value in tags.items() if key not in run.tags}
            if missing:
                self._instance.add_run_tags(run.run_id, missing)
        return super().submit_run(context)
