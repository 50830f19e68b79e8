"""Weights & Biases: metrics by step, inputs as configuration, and the last checkpoint as summary."""

import hashlib
from collections.abc import Mapping

import wandb

from dlac_pipeline.integrations.listeners.events import AttemptEnded, AttemptStarted, RunEvent
from dlac_pipeline.integrations.listeners.tracker import Metrics, Tracker
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.listeners_spec import WandbSpec


class WandbListener(Tracker):
    """Writer of a run of W&B, whose id is a digest of the ledger and the run."""

    def __init__(self, options: WandbSpec, spec: JobSpec) -> None:
        self._options = options
        self._run: wandb.Run | None = None
        self._exit_code = 1

    def start(self, event: AttemptStarted) -> None:
        """Open the run at the first attempt of this launch. Its id stays the same over launches."""
        options = self._options
        if self._run is None:
            self._run = wandb.init(
                project=options.project,
                entity=options.entity or None,
                mode=options.mode or None,
                name=event.run,
                id=hashlib.sha256(f"{event.ledger}/{event.run}".encode()).hexdigest()[:16],
                resume="allow",
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
            self._run.define_metric("*", step_metric="step")
        tables = {each.name: {"snapshot_id": str(each.snapshot_id), "rows": each.rows} for each in event.tables}
        facts = {name: getattr(event, name) for name in ("ledger", "attempt", "resumed_from", "world_size")}
        self._run.config.update({"inputs": tables, **facts}, allow_val_change=True)

    def log(self, event: RunEvent, metrics: Metrics) -> None:
        """Add values of metrics."""
        for step, values in metrics:
            self._current_run().log({"step": step, **values})

    def note(self, facts: Mapping[str, object]) -> None:
        """Set values of the summary. An id is a text, because W&B rounds large numbers."""
        values = {name: str(value) if name.endswith("_id") else value for name, value in facts.items()}
        self._current_run().summary.update(values)

    def end(self, event: AttemptEnded) -> None:
        """Note the exit status, for the end of the launch."""
        self._exit_code = int(event.ending in ("failed", "lost"))

    def close(self) -> None:
        """Upload the rest, or write it to its file."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)

    def _current_run(self) -> wandb.Run:
        if self._run is None:
            raise RuntimeError("expected an open run of W&B, found none: wandb.init failed before")
        return self._run
