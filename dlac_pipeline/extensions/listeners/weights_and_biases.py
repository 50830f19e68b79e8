"""Weights & Biases: metrics by step, inputs as configuration, and the last checkpoint as summary."""

import hashlib
from collections.abc import Mapping

import wandb

from dlac_pipeline.extensions.listeners.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointsRetired,
    RunBegun,
    RunEvent,
    WentBack,
)
from dlac_pipeline.extensions.listeners.tracker import Metrics, Tracker, branch_name
from dlac_pipeline.spec.job_spec import JobSpec


class WandbListener(Tracker):
    """Writer of a run of W&B for each branch, whose id is a digest of the ledger, the run and the branch."""

    def __init__(self, spec: JobSpec, *, project: str) -> None:
        super().__init__(spec)
        self._project = project
        self._run: wandb.Run | None = None
        self._exit_code = 1

    def start(self, event: AttemptStarted) -> bool:
        """Open the run at the first attempt of this launch on a branch. Its id stays the same over launches."""
        is_new, run = self._open(event.ledger, event.branch)
        tables = {each.name: {"snapshot_id": str(each.snapshot_id), "rows": each.rows} for each in event.tables}
        facts = {name: getattr(event, name) for name in ("ledger", "attempt", "resumed_from", "world_size")}
        run.config.update({"inputs": tables, **facts}, allow_val_change=True)
        return is_new and event.branch_is_new

    def begin(self, event: RunBegun, facts: Mapping[str, object]) -> None:
        """Create the run, and note the state that it begins with."""
        self._open(event.ledger, 1)[1].config.update(dict(facts), allow_val_change=True)
        self._exit_code = 0

    def leave(self, event: WentBack, facts: Mapping[str, object]) -> None:
        """Note it in the summary of the branch before."""
        self._open(event.ledger, event.branch - 1)[1].summary.update(dict(facts))
        self._exit_code = 0

    def retire(self, event: CheckpointsRetired) -> None:
        """Ignore it: the summary of a run that is not open cannot be read."""

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

    def _open(self, ledger: str, branch: int) -> tuple[bool, wandb.Run]:
        """Open the run of a branch, and end another one. Return True if this launch opens it and no earlier one is known."""
        name = f"{ledger}/{self._spec.run}" + (f"/{branch}" if branch > 1 else "")
        run_id = hashlib.sha256(name.encode()).hexdigest()[:16]
        if self._run is not None and self._run.id == run_id:
            return False, self._run
        self.close()
        self._run = run = wandb.init(
            project=self._project,
            name=branch_name(self._spec.run, branch),
            group=self._spec.run,
            id=run_id,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        run.define_metric("*", step_metric="step")
        return not run.resumed, run

    def _current_run(self) -> wandb.Run:
        if self._run is None:
            raise RuntimeError("expected an open run of W&B, found none: wandb.init failed before")
        return self._run
