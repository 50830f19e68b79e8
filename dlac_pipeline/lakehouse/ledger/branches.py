"""Branches of a run: a rewind makes its target the head. Rows of the abandoned branch stay as they are."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.ledger import run_rows, typed_rows
from dlac_pipeline.lakehouse.ledger.commits import beside, names_of
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
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
class Rewound:
    """Result of a rewind."""

    checkpoint_id: str | None
    """The new head. None: the run is at its beginning."""
    step: int
    left: str | None
    """The head before."""
    left_step: int
    attempt: int
    """Attempt of the rewind itself. Older attempts are fenced off."""
    excluded_rows_seen: int | None = None
    """Rows that this rewind excludes and that the head has been trained on. None: not counted."""
    clean_checkpoint: str | None = None
    """The newest checkpoint before the head that has seen none of those rows. None: it does not exist, or the head is clean."""
    clean_step: int | None = None
    """The step of that checkpoint. Where there is none: 0 if the run can begin again, None if it was adopted or forked."""
    not_counted: str = ""
    """Reason why such rows could not be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveBack:
    """A move of the head away from its branch: a rewind, or the quarantine of damaged checkpoints."""

    row: RewindRow | QuarantinedCheckpointRow
    left: str | None
    """The head before."""
    branch: int
    """Number of the branch after it. A run begins with branch 1."""


def commit_rewind(
    ledger: Ledger,
    run: str,
    *,
    nonce: str,
    checkpoint_id: str | None,
    exclude: Sequence[Exclusion] = (),
    why: str = "",
    facts: Mapping[str, Any] = {},
) -> Rewound:
    """Make a restorable checkpoint the head, and `nonce` the owner of the run, in one append that repetition lands once.

    Without a checkpoint the run is at its beginning again. `facts` are further fields of the `ClaimRow`, whose
    attempt trains nothing. Raises `NoSuchCheckpoint` for one that is retired, quarantined or unknown, and `SpecInvalid` for
    the head if nothing else would change.
    """
    done: Rewound | None = None

    def decide(state: RunState) -> Append | None:
        nonlocal done
        rows = ledger.rows_at(state, kinds=typed_rows.HEAD_KINDS)
        landed = [row for row in rows if isinstance(row, RewindRow) and row.nonce == nonce]
        if landed:
            done = _rewound(landed[0])
            return None
        fence, step = state.fence, 0
        if checkpoint_id is not None:
            step = run_rows.restorable(run, rows, None, checkpoint_id=checkpoint_id).step
        _check_changes(run, rows, checkpoint_id, step, exclude)
        head = run_rows.checkpoint_rows(rows).get(fence.head or "")
        mine = run_rows.Fence(attempt=fence.attempt + 1, nonce=nonce, seq=fence.seq + 1, head=checkpoint_id)
        claims = typed_rows.ClaimRow(replaces=fence.attempt, purpose="rewinds", origin=checkpoint_id, **facts)
        row = RewindRow(
            attempt=mine.attempt,
            checkpoint_id=checkpoint_id,
            step=step,
            left_checkpoint=fence.head,
            left_step=0 if head is None else head.step,
            exclude=exclude,
            why=why,
        )
        done = _rewound(row)
        return Append(rows=[claims, row], fence=mine)

    ledger.append(run, decide)
    assert done is not None, "an append that did not raise was decided"
    return done


def starts_over(rows: Sequence[LedgerRow]) -> bool:
    """Return True if a rewind to the beginning was the last move of the head. `rows` are in order of `seq`."""
    moved = [row for row in rows if isinstance(row, CheckpointRow | typed_rows.QuarantinedCheckpointRow | RewindRow)]
    return bool(moved) and isinstance(moved[-1], RewindRow) and moved[-1].checkpoint_id is None


def exclusions_in_force(rows: Sequence[LedgerRow]) -> tuple[Exclusion, ...]:
    """Return the exclusions of the rewinds on the surviving lineage, the oldest first. `rows` are in order of `seq`."""
    return _exclusions(_rewinds_by_checkpoint(rows)[1])


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


def retire_left(
    ledger: Ledger, run: str, checkpoint: str | None = None, *, only: Collection[str] | None = None, whole: bool = False
) -> list[CheckpointRow]:
    """Retire abandoned checkpoints without a name: one, by id or step, or all, or the ids in `only`. Return their rows.

    `whole`: retire the surviving lineage, too, so that the run cannot be resumed. Raises `SpecInvalid`.
    """
    gone: list[CheckpointRow] = []

    def decide(state: RunState) -> Append | None:
        nonlocal gone
        rows = ledger.rows_at(state, kinds=typed_rows.HEAD_KINDS)
        found = run_rows.restorable_rows(rows)
        if gone and not any(row.checkpoint_id in found for row in gone):
            return None  # an earlier try has landed
        needed = {*(() if whole else run_rows.lineage_of(rows, state.fence.head)), *names_of(rows).values()}
        abandoned = {name: row for name, row in found.items() if name not in needed and (only is None or name in only)}
        if checkpoint is not None:
            try:
                row = checkpoint_of(run, list(abandoned.values()), checkpoint)
            except NoSuchCheckpoint as err:
                raise SpecInvalid(
                    f"expected a checkpoint of run {run!r} on an abandoned branch and without a name, found {checkpoint!r}; "
                    f"there are {sorted(abandoned)!r}: on the surviving lineage set checkpoint.keep_last, and remove a name "
                    "with `dlac checkpoint untag`"
                ) from err
            abandoned = {row.checkpoint_id: row}
        gone = list(abandoned.values())
        retire = [typed_rows.RetireRow(checkpoint_id=name) for name in abandoned]
        return beside(state, retire) if retire else None

    ledger.append(run, decide)
    return gone


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


def _rewinds_by_checkpoint(rows: Sequence[LedgerRow]) -> tuple[dict[str, tuple[RewindRow, ...]], tuple[RewindRow, ...]]:
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


def _exclusions(rewinds: Sequence[RewindRow]) -> tuple[Exclusion, ...]:
    return tuple(dict.fromkeys(each for row in rewinds for each in row.exclude))


def _check_changes(
    run: str, rows: Sequence[LedgerRow], target: str | None, step: int, exclude: Sequence[Exclusion]
) -> None:
    found, now = _rewinds_by_checkpoint(rows)
    wanted = tuple(dict.fromkeys([*_exclusions(found.get(target or "", ())), *exclude]))
    stepped_back = target is None and not starts_over(rows)  # every checkpoint is damaged, and training is refused
    if target == run_rows.fence_of_rows(rows).head and wanted == _exclusions(now) and not stepped_back:
        place = "its beginning" if target is None else f"the head {target!r}"
        raise SpecInvalid(
            f"expected another checkpoint than the head of run {run!r}, or rows to exclude, found {place} at step {step} as it "
            "is: nothing to rewind"
        )


def _rewound(row: RewindRow) -> Rewound:
    return Rewound(
        checkpoint_id=row.checkpoint_id,
        step=row.step,
        left=row.left_checkpoint,
        left_step=row.left_step,
        attempt=row.attempt,
    )
