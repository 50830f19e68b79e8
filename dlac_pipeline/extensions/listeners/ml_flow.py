"""MLflow: metrics by step, inputs, and the last checkpoint as tags."""

import json
import math
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Run
from mlflow.exceptions import MlflowException

from dlac_pipeline.extensions.listeners.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointsRetired,
    InputTable,
    RunBegun,
    RunEvent,
    WentBack,
)
from dlac_pipeline.extensions.listeners.tracker import Metrics, Tracker, branch_name
from dlac_pipeline.spec.job_spec import JobSpec

_MOST_METRICS = 1000
"""Metrics that a server takes in one request."""
_STATUS = {"finished": "FINISHED", "caught_up": "FINISHED", "stopped": "KILLED", "left": "KILLED", "failed": "FAILED"}
"""Ending of an attempt -> status of the MLflow run. After a lost supervisor another one may train already."""


class MLflowListener(Tracker):
    """Writer of an MLflow run for each branch, which is known by its tags `dlac.ledger`, `dlac.run` and `dlac.branch`."""

    def __init__(self, spec: JobSpec, *, experiment: str) -> None:
        super().__init__(spec)
        self._client = MlflowClient()
        try:
            self._experiment = self._client.create_experiment(experiment)
        except MlflowException:  # it exists
            known = self._client.get_experiment_by_name(experiment)
            if known is None:
                raise
            self._experiment = known.experiment_id
        self._run_id = ""

    def start(self, event: AttemptStarted) -> bool:
        """Find the run of the branch by its tags, or create it."""
        is_new = self._open(event.ledger, event.branch)
        self._client.update_run(self._run_id, status="RUNNING")
        self._client.log_inputs(self._run_id, [_input(table) for table in event.tables])
        self.note({name: getattr(event, name) for name in ("attempt", "resumed_from", "world_size")})
        return is_new

    def begin(self, event: RunBegun, facts: Mapping[str, object]) -> None:
        """Create the run, which waits for its first launch."""
        if self._open(event.ledger, 1):
            self._client.update_run(self._run_id, status="SCHEDULED")
        self.note(facts)

    def leave(self, event: WentBack, facts: Mapping[str, object]) -> None:
        """Tag the runs of earlier branches, once. One that was never ended counts as killed."""
        for run in self._runs(event.ledger):
            tags = run.data.tags
            if int(tags["dlac.branch"]) < event.branch and tags["dlac.state"] == "current":
                self._run_id = run.info.run_id
                self.note(facts)
                if run.info.status in ("RUNNING", "SCHEDULED"):
                    self._client.set_terminated(self._run_id, "KILLED")

    def retire(self, event: CheckpointsRetired) -> None:
        """Tag the runs whose last checkpoint is retired with its id."""
        gone = {each.checkpoint_id for each in event.checkpoints}
        for run in self._runs(event.ledger):
            last = run.data.tags.get("dlac.checkpoint_id", "")
            if last in gone:
                self._client.set_tag(run.info.run_id, "dlac.retired_checkpoint_id", last)

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

    def _open(self, ledger: str, branch: int) -> bool:
        """Find the run of a branch, or create it. Return True if it is new."""
        found = self._runs(ledger, branch)
        if not found:
            run, number = self._spec.run, str(branch)
            tags = {"dlac.ledger": ledger, "dlac.run": run, "dlac.branch": number, "dlac.state": "current"}
            found = [self._client.create_run(self._experiment, run_name=branch_name(run, branch), tags=tags)]
            self._run_id = found[0].info.run_id
            return True
        self._run_id = found[0].info.run_id
        return False

    def _runs(self, ledger: str, branch: int | None = None) -> list[Run]:
        """Return the runs of the training run, or of one branch of it."""
        tags = {"dlac.ledger": ledger, "dlac.run": self._spec.run}
        tags |= {} if branch is None else {"dlac.branch": str(branch)}
        wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        return list(self._client.search_runs([self._experiment], filter_string=wanted))


def _input(table: InputTable) -> DatasetInput:
    dataset = Dataset(
        name=table.table,
        digest=str(table.snapshot_id),
        source_type="iceberg",
        source=json.dumps({"table": table.table, "snapshot_id": table.snapshot_id}),
        profile=json.dumps({"num_rows": table.rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
