"""MLflow: one MLflow run per training run, over all recoveries and launches.

`loss` has each committed step once, with the loss that the ledger has. `progress/loss` is sampled while training, and has
repeated steps twice.
"""

import json
import math

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, RunStatus
from mlflow.exceptions import MlflowException

from dlac_pipeline.integrations.listeners.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    ProgressMade,
    RecoveryEnded,
    RunEvent,
)
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.listeners_spec import MLflowSpec

_MOST_METRICS = 1000
"""Metrics that a server takes in one request."""
_LEDGER, _RUN = "dlac.ledger", "dlac.run"
"""Tags that together identify the training run."""
_STATUS = {"finished": "FINISHED", "caught_up": "FINISHED", "stopped": "KILLED", "left": "KILLED", "failed": "FAILED"}
"""Ending of an attempt -> status of the MLflow run. After a lost supervisor another one may train already."""


class MLflowListener:
    """Writer of an MLflow run."""

    def __init__(self, options: MLflowSpec, spec: JobSpec) -> None:
        self._run = spec.run
        self._client = MlflowClient(tracking_uri=options.tracking_uri or None)
        self._experiment = self._experiment_of(options.experiment)
        self._run_id = ""

    def on_event(self, event: RunEvent) -> None:
        """Write an event to the MLflow run."""
        if isinstance(event, AttemptStarted):
            self._start(event)
        elif isinstance(event, ProgressMade):
            gauges = {name: value for name, value in event.gauges().items() if name != "step"}
            self._log(event, [(f"progress/{name}", value, event.step) for name, value in gauges.items()])
        elif isinstance(event, CheckpointCommitted):
            self._note_checkpoint(event)
        elif isinstance(event, RecoveryEnded):
            seconds = event.phases[-1].end - event.phases[0].start
            self._log(event, [("recovery_s", seconds, event.attempt)])
        elif isinstance(event, AttemptEnded) and event.ending in _STATUS:
            self._client.set_terminated(self._run_id, _STATUS[event.ending])

    def _start(self, event: AttemptStarted) -> None:
        """Find or create the run of this training run, and note what the attempt reads."""
        known = self._client.search_runs(
            [self._experiment],
            filter_string=f"tags.`{_LEDGER}` = '{event.ledger}' and tags.`{_RUN}` = '{event.run}'",
            max_results=1,
        )
        if known:
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, status=RunStatus.to_string(RunStatus.RUNNING))
        else:
            tags = {_LEDGER: event.ledger, _RUN: event.run}
            self._run_id = self._client.create_run(self._experiment, run_name=event.run, tags=tags).info.run_id
        tags = {"attempt": event.attempt, "resumed_from": event.resumed_from or "", "world_size": event.world_size}
        for name, value in tags.items():
            self._client.set_tag(self._run_id, f"dlac.{name}", value)
        self._client.log_inputs(self._run_id, [_input_of(event, place) for place in range(len(event.tables))])

    def _note_checkpoint(self, event: CheckpointCommitted) -> None:
        first = event.step - len(event.losses) + 1
        self._log(event, [("loss", loss, first + place) for place, loss in enumerate(event.losses)])
        tags = {
            "checkpoint": event.checkpoint_id,
            "checkpoint_step": event.step,
            "checkpoint_location": event.location,
            "ledger_snapshot_id": event.ledger_snapshot_id,
        }
        for name, value in tags.items():
            self._client.set_tag(self._run_id, f"dlac.{name}", value)

    def _log(self, event: RunEvent, metrics: list[tuple[str, float, int]]) -> None:
        found = [
            Metric(name, value, int(event.at * 1000), step) for name, value, step in metrics if not math.isnan(value)
        ]
        for first in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=found[first : first + _MOST_METRICS])

    def _experiment_of(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has just created it
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)


def _input_of(event: AttemptStarted, place: int) -> DatasetInput:
    table = event.tables[place]
    dataset = Dataset(
        name=table.table,
        digest=str(table.snapshot_id),
        source_type="iceberg",
        source=json.dumps({"table": table.table, "snapshot_id": table.snapshot_id}),
        profile=json.dumps({"num_rows": table.rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
