"""Dagster's run queue, which lets a training run have one trainer at a time: named in dagster.yaml as the run coordinator."""

import dagster as dg
from dagster import QueuedRunCoordinator, SubmitRunContext

from assets.failures import RUN_TAG
from jobs.training_runs import training_run_of, trains


class TrainingRunCoordinator(QueuedRunCoordinator):
    """Tags a Dagster run that trains with the name of its training run before it is queued, whoever launches it from wherever.

    By that tag the queue's `tag_concurrency_limits` hold back a second trainer of the same training run. It is a
    courtesy, as the run's lock is: safety rests on the fence.
    """

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        """Tag and enqueue."""
        run = context.dagster_run
        name = training_run_of(run) if RUN_TAG not in run.tags and trains(run) else ""
        if name:
            self._instance.add_run_tags(run.run_id, {RUN_TAG: name})
        return super().submit_run(context)
