"""Branches of a run: a rewind makes its target the head. Rows of the abandoned branch stay as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.ledger import run_rows, typed_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    CheckpointRow,
    Exclusion,
    LedgerRow,
    QuarantinedCheckpointRow,
    RewindRow,
)

FORGET_REASON = "forget: "
"""Beginning of the reason of a rewind that `dlac forget rows` makes. The id of the request follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveBack:
    """A move of the head away from its branch: a rewind, or the quarantine of damaged checkpoints."""

    row: RewindRow | QuarantinedCheckpointRow
    left: str | None
    """The head before."""
    branch: int
    """Number of the branch after it. A run begins with branch 1."""


def starts_over(rows: Sequence[LedgerRow]) -> bool:
    """Return True if a rewind to the beginning was the last move of the head. `rows` are in order of `seq`."""
    moved = [row for row in rows if isinstance(row, CheckpointRow | typed_rows.QuarantinedCheckpointRow | RewindRow)]
    return bool(moved) and isinstance(moved[-1], RewindRow) and moved[-1].checkpoint_id is None


def exclusions_in_force(rows: Sequence[LedgerRow]) -> tuple[Exclusion, ...]:
    """Return the exclusions of the rewinds on the surviving lineage, the oldest first. `rows` are in order of `seq`."""
    return exclusions_of(rewinds_by_checkpoint(rows)[1])


def moves_back(rows: Sequence[LedgerRow]) -> list[MoveBack]:
    """Return the moves of the head away from its branch, in order. `rows` are in order of `seq`.

    A rewind to the head itself, with exclusions, stays on the branch.
    """
    found: list[MoveBack] = []
    head, branch = None, 1
    for _, append in groupby(rows, key=lambda row: row.seq):
        added = list(append)
        moved = next((row for row in added if isinstance(row, RewindRow | QuarantinedCheckpointRow)), None)
        if moved is not None:
            branch += moved.head_after != head
            found.append(MoveBack(row=moved, left=head, branch=branch))
        head = added[-1].head_after
    return found


def checkpoint_of(run: str, rows: Sequence[LedgerRow], named: str) -> CheckpointRow:
    """Return the row of the checkpoint with the id `named`, or of that step, retired or not.

    Raises `NoSuchCheckpoint`, or `SpecInvalid` if the run passed the step more than once, on several branches.
    """
    checkpoints = run_rows.checkpoint_rows(rows)
    if named in checkpoints:
        return checkpoints[named]
    found = [row for row in checkpoints.values() if str(row.step) == named]
    if not found:
        steps = {name: row.step for name, row in checkpoints.items()}
        raise NoSuchCheckpoint(
            f"expected the id or the step of a checkpoint of run {run!r}, found {named!r}; there are {steps!r}"
        )
    newest = max(found, key=lambda row: row.seq)
    if not {row.checkpoint_id for row in found} <= set(run_rows.lineage_of(rows, newest.checkpoint_id)):
        raise SpecInvalid(
            f"expected one checkpoint of run {run!r} at step {named}, found {[row.checkpoint_id for row in found]!r}: "
            "name one of these"
        )
    return newest


def last_seq_as_head(rows: Sequence[LedgerRow], checkpoint_id: str) -> int:
    """The last `seq` at which a checkpoint was the head: up to it, the rows describe its branch as it was left."""
    return max(row.seq for row in rows if row.head_after == checkpoint_id)


def left_by_rewinds(rows: Sequence[LedgerRow]) -> set[str]:
    """The checkpoints between the targets of rewinds and the heads that these abandoned."""
    abandoned: set[str] = set()
    for row in rows:
        if isinstance(row, RewindRow):
            abandoned |= set(run_rows.lineage_of(rows, row.left_checkpoint)) - set(
                run_rows.lineage_of(rows, row.checkpoint_id)
            )
    return abandoned


def rewinds_by_checkpoint(rows: Sequence[LedgerRow]) -> tuple[dict[str, tuple[RewindRow, ...]], tuple[RewindRow, ...]]:
    """Return checkpoint id -> the rewinds on its lineage, and those on the lineage of the next commit.

    A quarantine steps back along the lineage, perhaps beyond the rewind's target. Its branch continues nevertheless.
    """
    found: dict[str, tuple[RewindRow, ...]] = {}
    now: tuple[RewindRow, ...] = ()
    for row in rows:
        if isinstance(row, CheckpointRow):
            found[row.checkpoint_id] = now
        elif isinstance(row, RewindRow):
            now = (*found.get(row.checkpoint_id or "", ()), row)
    return found, now


def exclusions_of(rewinds: Sequence[RewindRow]) -> tuple[Exclusion, ...]:
    """Return the exclusions of rewinds, each once."""
    return tuple(dict.fromkeys(each for row in rewinds for each in row.exclude))
