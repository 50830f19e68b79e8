"""Events that listeners receive. Moments are in seconds since the epoch, durations in seconds."""

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """An event of one attempt of a run."""

    run: str
    attempt: int
    """Number of the attempt, from 1."""
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InputTable:
    """A table that an attempt reads."""

    name: str
    """Name of the source in the job spec."""
    table: str
    """Table as namespace.table, or location of a Delta or Hudi table."""
    snapshot_id: int
    """Pinned snapshot, or version of a Delta table."""
    rows: int
    """Rows of the plan that are not excluded or deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted(RunEvent):
    """A supervisor has claimed the run, and verified the checkpoint to resume from."""

    ledger: str
    """Identity of the lakehouse's ledger: runs of two lakehouses may have the same name."""
    tables: tuple[InputTable, ...]
    world_size: int
    """Number of ranks."""
    nodes: int
    step: int
    """Optimizer step to resume after, or 0."""
    resumed_from: str | None
    """Id of the checkpoint to resume from, or None for the start of the run."""
    parent_run: str
    """Orchestrator's run, such as a run of Dagster. Empty without one."""
    branch: int
    """Number of the run's branch: 1, and one more each time that the run went back."""
    branch_is_new: bool
    """True if no checkpoint was committed since the run went back."""
    rows_at_risk: int
    """Rows of the memory state to resume from, as in `ProgressMade`. They are estimated where rows are packed."""

    def gauges(self) -> dict[str, float]:
        """Return the known numbers by name."""
        return {"step": self.step, "rows_at_risk": self.rows_at_risk}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressMade(RunEvent):
    """The ranks have finished further steps. At most one event in half a second."""

    step: int
    """Last optimizer step that all ranks have finished."""
    loss_step: int
    """Step of `loss`, or 0 before the first loss."""
    loss: float
    """Mean loss over the global batch of `loss_step`."""
    rows: int
    """Rows of the steps that this attempt has finished."""
    rows_at_risk: int
    """Rows of finished steps that no committed checkpoint has: a failure now repeats them."""
    rows_per_s: float
    """Rows per second since the event before."""
    tokens_per_s: float | None
    """Tokens per second since the event before, or None if samples are no sequences of tokens."""

    def gauges(self) -> dict[str, float]:
        """Return the known numbers by name."""
        found = {name: getattr(self, name) for name in ("step", "rows_at_risk", "rows_per_s", "tokens_per_s")}
        found |= {"loss_step": self.loss_step, "loss": self.loss} if self.loss_step else {}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(RunEvent):
    """A checkpoint and its rows are in the ledger."""

    step: int
    checkpoint_id: str
    location: str
    """Address of the checkpoint's folder."""
    ledger_snapshot_id: int
    """Snapshot of the ledger table that first shows the checkpoint."""
    bytes: int
    duration_s: float
    rows_by_table: dict[str, int]
    """Name of each source -> rows consumed since the checkpoint before."""
    losses: tuple[float, ...]
    """Loss of each step since the checkpoint before. The last one belongs to `step`."""
    rows_at_risk: int
    """Rows at risk just after the commit, as in `ProgressMade`."""

    def gauges(self) -> dict[str, float]:
        """Return the known numbers by name."""
        return {"rows_at_risk": self.rows_at_risk}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPhase:
    """A phase of a recovery."""

    name: str
    """Phase: detect, schedule, stop, claim, verify, convert, load, first_step."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryEnded(RunEvent):
    """A recovery has ended: with the first step of the attempt, or because the attempt failed before it."""

    outcome: Literal["resumed", "failed again"]
    cause: str
    """Failure of the attempt before."""
    noticed_by: str
    rows_replayed: int
    """Rows of finished steps that are read again."""
    phases: tuple[RecoveryPhase, ...]
    """Phases in order. The first begins with the last heartbeat before the failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(RunEvent):
    """An attempt has ended."""

    ending: Literal["finished", "caught_up", "stopped", "left", "failed", "lost"]
    """In order, the ending: finished, no appended rows are left, it was stopped, its script returned early, a rank failed, or the
    supervisor was lost."""
    reason: str
    """Cause of a failure. Empty otherwise."""
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGivenUp(RunEvent):
    """No attempt follows the failed one, until a person acts."""

    reason: str
    """Failure of the last attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsQuarantined(RunEvent):
    """The next attempt leaves out rows."""

    reason: str
    path: str
    """Data file of the rows. Empty if they are in several files."""
    row_group: int | None
    rows: int | None
    """Number of rows, or None for a row group that does not decode."""
    is_tentative: bool
    """True if the next attempt only tests if these rows are to blame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint in the ledger."""

    checkpoint_id: str
    step: int
    attempt: int
    """Attempt that committed it."""
    location: str
    """Address of its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRows:
    """Rows of an attempt that are part of the run's present state."""

    attempt: int
    tables: tuple[InputTable, ...]
    rows_by_table: dict[str, int]
    """Name of each source -> rows of the attempt's checkpoints on the run's present branch."""
    checkpoint: Checkpoint | None
    """Last checkpoint of the attempt on that branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WentBack(RunEvent):
    """The run went back to an earlier checkpoint, and continues from it on another branch.

    `attempt` is the rewind, or the attempt that found damaged checkpoints. A launch repeats the event until the branch has a
    checkpoint, because the command that caused it may not have known the listeners.
    """

    ledger: str
    cause: Literal["rewind", "forget", "damaged"]
    reason: str
    branch: int
    """Number of the branch from now on. A rewind to the head, which only excludes rows, stays on its branch."""
    step: int
    checkpoint_id: str | None
    """Checkpoint to continue from, or None for the start of the run."""
    left_step: int
    abandoned: tuple[Checkpoint, ...]
    """Checkpoints that are no more part of the run's state, the newest first. Their files stay until they are retired."""
    restored: tuple[Checkpoint, ...]
    """Checkpoints of an abandoned branch that are part of it again."""
    attempts: tuple[AttemptRows, ...]
    """The rest of each attempt that has any of these checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsRetired(RunEvent):
    """A command retired checkpoints: their files are removed."""

    ledger: str
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBegun(RunEvent):
    """A run began with an existing state: it was forked or adopted. A launch repeats the event until the run has trained."""

    ledger: str
    checkpoint: Checkpoint
    """First checkpoint of the run, at step 0."""
    parent_run: str
    """Run that it was forked from. Empty if it was adopted."""
    origin: str
    """Address of the checkpoint that it was made from."""
    origin_id: str
    """Id of the parent's checkpoint. Empty if it was adopted."""
    origin_step: int


class Listener(Protocol):
    """Receiver of a run's events, in another thread. A method `close()`, if there is one, is called after the last event.

    An entry of `dlac.listeners` makes one: `make(**options)`, with the options of its table in the job spec. If `make` has a
    parameter `spec`, it also receives the job spec.
    """

    def on_event(self, event: RunEvent) -> None:
        """Receive an event. An exception is logged, and the listener receives further events."""
