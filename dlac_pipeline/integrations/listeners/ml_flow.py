"""MLflow: metrics by step, inputs, and the last checkpoint as tags."""

import json
import math
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric
from mlflow.exceptions import MlflowException

from dlac_pipeline.integrations.listeners.events import AttemptEnded, AttemptStarted, InputTable, RunEvent
from dlac_pipeline.integrations.listeners.tracker import Metrics, Tracker
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.listeners_spec import MLflowSpec

_MOST_METRICS = 1000
"""Metrics that a server takes in one request."""
_STATUS = {"finished": "FINISHED", "caught_up": "FINISHED", "stopped": "KILLED", "left": "KILLED", "failed": "FAILED"}
"""Ending of an attempt -> status of the MLflow run. After a lost supervisor another one may train already."""


class MLflowListener(Tracker):
    """Writer of an MLflow run, which is known by its tags `dlac.ledger` and `dlac.run`."""

    def __init__(self, options: MLflowSpec, spec: JobSpec) -> None:
        self._client = MlflowClient(tracking_uri=options.tracking_uri or None)
        try:
            self._experiment = self._client.create_experiment(options.experiment)
        except MlflowException:  # it exists
            known = self._client.get_experiment_by_name(options.experiment)
            if known is None:
                raise
            self._experiment = known.experiment_id
        self._run_id = ""

    def start(self, event: AttemptStarted) -> None:
        """Find the run by its tags, or create it."""
        tags = {"dlac.ledger": event.ledger, "dlac.run": event.run}
        wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found = self._client.search_runs([self._experiment], filter_string=wanted, max_results=1)
        run = found[0] if found else self._client.create_run(self._experiment, run_name=event.run, tags=tags)
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._client.log_inputs(self._run_id, [_input(table) for table in event.tables])
        self.note({name: getattr(event, name) for name in ("attempt", "resumed_from", "world_size")})

    def log(self, event: RunEvent, metrics: Metrics) -> None:
        """Add values of metrics, without those that are no numbers."""
        moment = int(event.at * 1000)
        found = [
            Metric(name, value, moment, step)
            for step, values in metrics
            for name, value in values.items()
            if not math.isnan(value)
        ]
        for first in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=found[first : first + _MOST_METRICS])

    def note(self, facts: Mapping[str, object]) -> None:
        """Set tags."""
        for name, value in facts.items():
            self._client.set_tag(self._run_id, f"dlac.{name}", "" if value is None else value)

    def end(self, event: AttemptEnded) -> None:
        """Set the status."""
        if event.ending in _STATUS:
            self._client.set_terminated(self._run_id, _STATUS[event.ending])


def _input(table: InputTable) -> DatasetInput:
    dataset = Dataset(
        name=table.table,
        digest=str(table.snapshot_id),
        source_type="iceberg",
        source=json.dumps({"table": table.table, "snapshot_id": table.snapshot_id}),
        profile=json.dumps({"num_rows": table.rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
