"""The resume point of an attempt, as its ranks receive it: a fresh start, a checkpoint, or a state in memory."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

from dlac_pipeline.plan.order import ReaderState, reader_state_of

Source: TypeAlias = tuple[str, int, list[int]]
"""Address and port of a node that has parts of a state in memory, and their ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _AttemptFacts:
    """Facts of an attempt that do not depend on its resume point."""

    attempt: int
    nonce: str
    leg: str
    """The leg as JSON. It is committed already unless `leg_is_new`."""
    leg_is_new: bool
    replaces: int = 0
    leaves_out_more: bool = False
    """True if the leg is new and leaves out rows that the one before it did not."""
    branch: int = 1
    """Number of the run's branch: 1, and one more for each move of the head away from a branch."""
    went_back: list[int] = field(default_factory=list)
    """Attempts that moved the head so since the last commit of a checkpoint. A rewind is an attempt."""
    quarantined: list[str] = field(default_factory=list)
    """Damaged checkpoints that the start of this attempt has quarantined."""
    skipped: list[int] = field(default_factory=list)
    """Steps of the leg up to the checkpoint that the engine did not apply, if they are replayed."""
    claim_s: float = 0.0
    verify_s: float = 0.0
    spike_step: int = 0
    """Step up to which loss spikes are trained through."""
    copies_at_once: bool = False
    """True if an attempt of this launch ended because a state changed while it was copied beside training."""
    rehearses_until: int = 0
    """Last step of a rehearsal, which commits nothing. 0 for a launch that trains."""
    failures: int = 0
    """Attempts before this one that failed."""
    trained_s: float = 0.0
    """Seconds that all attempts before this one trained."""
    checkpoint_cost: list[float] = field(default_factory=list)
    """Seconds that the last checkpoint took from training, and in all. Empty: the run has none."""

    @property
    def cursors(self) -> ReaderState:
        """Cursor of each source and key group. Empty: the leg, or the state in memory, has the cursors."""
        return []

    def to_json(self) -> str:
        """Return this resume point as JSON, for the ranks."""
        return json.dumps({"kind": type(self).__name__, **asdict(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshStart(_AttemptFacts):
    """Start of a run: at step 0, with the state that the script makes."""

    step: ClassVar[int] = 0
    head_step: ClassVar[int] = 0
    checkpoint_id: ClassVar[None] = None
    """The run has no checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCheckpoint(_AttemptFacts):
    """Resume point at a checkpoint whose files were verified."""

    step: int
    checkpoint_id: str
    folder: str
    """Folder of the verified files on `host`."""
    host: str
    manifest_uri: str
    manifest_digest: str
    world_size: int
    """Number of ranks that saved the checkpoint."""
    engine: str
    reader_state: list[list[list[int]]]
    """Cursor of each source and key group: [pass, block, position, offset]."""
    mesh: dict[str, int] = field(default_factory=dict)
    """Dimensions of a replica at the save, if it had several ranks."""

    @property
    def head_step(self) -> int:
        """Step of the checkpoint."""
        return self.step

    @property
    def cursors(self) -> ReaderState:
        """Cursor of each source and key group."""
        return reader_state_of(self.reader_state)


@dataclass(frozen=True, kw_only=True, slots=True)
class FromMemory(_AttemptFacts):
    """Resume point at a state in memory, which is newer than the checkpoint that it continues. Ranks fail if it is lost."""

    step: int
    memory_of: int
    """The attempt that saved the state."""
    memory_at: float
    """Time of the state in seconds since the epoch."""
    folder: str
    """Folder of the state on this node, which has its cursors, too. Empty: it is lost."""
    world_size: int
    """Number of ranks that saved the state."""
    engine: str
    loads_own_files: bool
    """True if a rank loads only its files of the state and rank 0's, when as many ranks saved it."""
    checkpoint_id: str | None
    """The checkpoint that the state continues. None: the beginning of the run."""
    head_step: int
    """Step of that checkpoint."""
    head_at: float
    """Time of that checkpoint, or of the run's beginning."""
    manifest_uri: str
    """Address of that checkpoint's manifest, or empty."""
    head_damage: str = ""
    """Damage of that manifest, or empty. The next checkpoint quarantines its parent."""
    mesh: dict[str, int] = field(default_factory=dict)
    """Dimensions of a replica at the save, if it had several ranks."""
    sources: list[Source] = field(default_factory=list)
    """The nodes that have parts of the state. Empty with one node."""


ResumePoint: TypeAlias = FreshStart | FromCheckpoint | FromMemory


def resume_point_of(record: dict[str, Any]) -> ResumePoint:
    """Return the resume point of a parsed record that `to_json` wrote."""
    kinds: dict[str, type[ResumePoint]] = {each.__name__: each for each in (FreshStart, FromCheckpoint, FromMemory)}
    facts = {name: value for name, value in record.items() if name != "kind"}
    if "sources" in facts:  # JSON has no tuples
        facts["sources"] = [(host, port, ranks) for host, port, ranks in facts["sources"]]
    return kinds[record["kind"]](**facts)
