"""Values of the simulation: states of training, copies in memory, and rows of the ledger."""

from collections.abc import Iterable
from dataclasses import dataclass

BATCH = 6
"""Rows of a global batch. Four ranks do not divide it."""
LAST_STEP = 18
"""The step at which the run is finished."""


def rows_of(leg: int, step: int) -> range:
    """Return the rows of a step: a pure function of the leg."""
    start = (leg * 1000 + step) * BATCH
    return range(start, start + BATCH)


def digest_rows(before: int, rows: Iterable[int]) -> int:
    """Return the digest of all consumed rows, in order: `before` and the rows of one more step."""
    return hash((before, *rows))


@dataclass(frozen=True, slots=True)
class State:
    """A state of training."""

    step: int
    rows: int
    """Digest of the rows consumed so far. An oracle computes it from the ledger alone."""
    bits: int
    """Identity of the exact parameters. Each executed step makes others, so it identifies the state's ancestors."""


GENESIS = State(0, 0, 0)


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """The origin of a copy in memory. All parts of one copy have the same stamp."""

    step: int
    attempt: int
    quorum: int
    nonce: int
    leg: int
    parts: int


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a copy in the memory of a node."""

    stamp: Stamp
    index: int
    state: State
    digest_holds: bool = True
    """False for a part that was torn on its way."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Owner of the run, length of its ledger, and its head."""

    attempt: int
    nonce: int
    seq: int
    head: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the ledger. Its append installs `fence`."""

    fence: Fence
    append_id: int
    """Name of the append. A repeated append has the same one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRow(Row):
    """A new attempt. It trains from the head, or from a copy in memory."""

    replaces: int
    leg: int
    memory: Stamp | None = None
    members: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindRow(ClaimRow):
    """An operator's return to an earlier checkpoint. Its attempt trains nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuorumRow(Row):
    """A change of the nodes that train together. The claim is quorum 0 of its attempt."""

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow(Row):
    """A durable checkpoint, and the rows that it consumed since its parent."""

    checkpoint: int
    parent: int
    nonce: int
    """Of the attempt that staged it."""
    quorum: int
    state: State
    named: tuple[tuple[int, range], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineRow(Row):
    """Damaged checkpoints, before the first checkpoint of the attempt that found them. The head steps back."""

    damaged: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishRow(Row):
    """The end of the run."""


BEGINNING = CheckpointRow(
    fence=Fence(0, 0, 0, 0), append_id=0, checkpoint=0, parent=0, nonce=0, quorum=0, state=GENESIS, named=()
)
"""The initial checkpoint. It is in the store from the start, and never damaged."""
