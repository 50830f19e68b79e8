"""Weights & Biases: one run of W&B per training run, over all recoveries and launches.

`loss` has each committed step once, with the loss that the ledger has. `progress/loss` is sampled while training.
"""

import hashlib

import wandb

from dlac_pipeline.integrations.listeners.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    ProgressMade,
    RecoveryEnded,
    RunEvent,
)
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.listeners_spec import WandbSpec


class WandbListener:
    """Writer of a run of W&B."""

    def __init__(self, options: WandbSpec, spec: JobSpec) -> None:
        self._options = options
        self._spec = spec
        self._run: wandb.Run | None = None
        self._exit_code = 1

    def on_event(self, event: RunEvent) -> None:
        """Write an event to the run."""
        if isinstance(event, AttemptStarted):
            self._start(event)
        elif self._run is None:
            return
        elif isinstance(event, ProgressMade):
            gauges = {f"progress/{name}": value for name, value in event.gauges().items() if name != "step"}
            self._run.log({"step": event.step, **gauges})
        elif isinstance(event, CheckpointCommitted):
            first = event.step - len(event.losses) + 1
            for place, loss in enumerate(event.losses):
                self._run.log({"step": first + place, "loss": loss})
            self._run.summary.update(
                {
                    "checkpoint": event.checkpoint_id,
                    "checkpoint_step": event.step,
                    "checkpoint_location": event.location,
                    "ledger_snapshot_id": str(event.ledger_snapshot_id),
                }
            )
        elif isinstance(event, RecoveryEnded):
            self._run.summary.update({"recovery_s": event.phases[-1].end - event.phases[0].start})
        elif isinstance(event, AttemptEnded):
            self._exit_code = int(event.ending in ("failed", "lost"))

    def close(self) -> None:
        """Upload the rest, or write it to its file."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code, quiet=True)

    def _start(self, event: AttemptStarted) -> None:
        """Open the run at the first attempt, and note what each attempt reads."""
        if self._run is None:
            self._run = wandb.init(
                project=self._options.project,
                entity=self._options.entity or None,
                mode=self._options.mode or None,
                name=event.run,
                id=hashlib.sha256(f"{event.ledger}/{event.run}".encode()).hexdigest()[:16],
                resume="allow",
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
            self._run.define_metric("*", step_metric="step")
        inputs = {
            table.name: {"table": table.table, "snapshot_id": str(table.snapshot_id), "rows": table.rows}
            for table in event.tables
        }
        facts = {"run": event.run, "ledger": event.ledger, "inputs": inputs}
        attempt = {"attempt": event.attempt, "resumed_from": event.resumed_from, "world_size": event.world_size}
        self._run.config.update({**facts, **attempt}, allow_val_change=True)
