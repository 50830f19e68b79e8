"""Dagster's run queue, which lets a training run have one trainer at a time: named in dagster.yaml as the run coordinator."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster import QueuedRunCoordinator, SubmitRunContext

from assets.failures import RUN_TAG


class TrainingRunCoordinator(QueuedRunCoordinator):
    """Tags a Dagster run with the name of its training run before it is queued, whoever launches it from wherever.

    By that tag the queue's `tag_concurrency_limits` hold back a second trainer of the same training run. It is a
    courtesy, as the run's lock is: safety rests on the fence.
    """

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        """Tag and enqueue."""
        run = context.dagster_run
        spec = raw_spec_of(run.run_config)
        if RUN_TAG not in run.tags and spec is not None and isinstance(spec.get("run"), str):
            self._instance.add_run_tags(run.run_id, {RUN_TAG: spec["run"]})
        return super().submit_run(context)


def raw_spec_of(run_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The job spec in the configuration of a Dagster run, as it is written there; None: there is none.

    Nothing is validated yet: a key without a value is None in YAML, and what a person wrote may be anything.
    """
    found: Any = run_config
    for name in ("resources", "job", "config", "spec"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
