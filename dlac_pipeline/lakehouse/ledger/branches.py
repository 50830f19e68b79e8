"""Branches of a run: a rewind to an earlier checkpoint, what counts from then on, and what is abandoned.

A `rewind` row begins a branch at its target, which is the head from then on. Rows of the abandoned branch stay as they are.
They are not on the lineage of the head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.ledger.commits import beside, names_of
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.run_rows import (
    HEAD_KINDS,
    Fence,
    Row,
    checkpoint_rows,
    fence_of_rows,
    lineage_of,
    restorable,
    restorable_rows,
)

_BEGINNING: Row = {"checkpoint_id": None, "step": 0}
"""The place of a run without a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """Rows that a branch leaves out: those of a source for which a filter is true."""

    source: int
    """Number of the source in the job spec, from 0."""
    where: str


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
    """The newest checkpoint before the head that has seen none of those rows, if the head has seen some.

    None: it does not exist.
    """
    clean_step: int | None = None
    """The step of that checkpoint. Where there is none: 0 if the run can begin again, None if it was adopted or forked."""
    not_counted: str = ""
    """Reason why such rows could not be counted."""


def commit_rewind(
    ledger: Ledger,
    run: str,
    *,
    nonce: str,
    checkpoint_id: str | None,
    exclude: Sequence[Exclusion] = (),
    why: str = "",
    detail: dict[str, Any],
) -> Rewound:
    """Make a restorable checkpoint the head, and `nonce` the owner of the run, in one append: once, however often it is
    repeated.

    Without a checkpoint the run is at its beginning again. `detail` has further facts of the claim, whose attempt trains
    nothing.

    Raises:
        NoSuchCheckpoint: the run has no such checkpoint, or it is retired or quarantined.
        SpecInvalid: it is the head, and nothing else would change.
    """
    done: Rewound | None = None

    def decide(state: RunState) -> Append | None:
        nonlocal done
        rows = ledger.rows_at(state, kinds=HEAD_KINDS)
        landed = [row for row in rows if row["kind"] == "rewind" and row["nonce"] == nonce]
        if landed:
            done = _rewound(landed[0])
            return None
        fence, target = state.fence, _BEGINNING
        if checkpoint_id is not None:
            target = restorable(run, rows, None, checkpoint_id=checkpoint_id)
        _check_changes(run, rows, target, exclude)
        head = checkpoint_rows(rows).get(fence.head or "", {"step": 0})
        mine = Fence(attempt=fence.attempt + 1, nonce=nonce, seq=fence.seq + 1, head=checkpoint_id)
        claims = {"replaces": fence.attempt, "rewinds": checkpoint_id, **detail}
        row = _make_row(target, fence.head, head["step"], exclude, why)
        done = _rewound({**row, "attempt": mine.attempt})
        return Append(rows=[{"kind": "claim", "detail": json.dumps(claims)}, row], fence=mine)

    ledger.append(run, decide)
    assert done is not None, "an append that did not raise was decided"
    return done


def starts_over(rows: Sequence[Row]) -> bool:
    """Return True if a rewind to the beginning was the last move of the head. `rows` are in order of `seq`."""
    moved = [row for row in rows if row["kind"] in ("checkpoint", "quarantine", "rewind") and _moves_head(row)]
    return bool(moved) and moved[-1]["kind"] == "rewind" and moved[-1]["checkpoint_id"] is None


def exclusions_in_force(rows: Sequence[Row]) -> tuple[Exclusion, ...]:
    """Return the exclusions of the rewinds on the surviving lineage, the oldest first. `rows` are in order of `seq`."""
    _, now = _rewinds_by_checkpoint(rows)
    return _exclusions(now)


def retire_left(ledger: Ledger, run: str, checkpoint: str | None = None) -> list[Row]:
    """Retire checkpoints that are not on the surviving lineage and have no name: one, by id or step, or all.

    Return their rows.

    Raises:
        SpecInvalid: the checkpoint does not exist, it is on the surviving lineage, or it has a name.
    """
    gone: list[Row] = []

    def decide(state: RunState) -> Append | None:
        nonlocal gone
        rows = ledger.rows_at(state, kinds=HEAD_KINDS)
        there = restorable_rows(rows)
        if gone and not any(row["checkpoint_id"] in there for row in gone):
            return None  # an earlier try has landed
        kept = {*lineage_of(rows, state.fence.head), *names_of(rows).values()}
        left = {name: row for name, row in there.items() if name not in kept}
        if checkpoint is not None:
            row = _one_left(run, left, checkpoint)
            left = {row["checkpoint_id"]: row}
        gone = list(left.values())
        retire = [{"kind": "retire", "checkpoint_id": name} for name in left]
        return beside(state, retire) if retire else None

    ledger.append(run, decide)
    return gone


def checkpoint_of(run: str, rows: Sequence[Row], named: str) -> Row:
    """Of these rows that of the checkpoint with the id `named`, or of that step, retired or not.

    Raises:
        NoSuchCheckpoint: there is none.
        SpecInvalid: the run came by the step more than once, on several branches.
    """
    checkpoints = checkpoint_rows(rows)
    if named in checkpoints:
        return checkpoints[named]
    found = [row for row in checkpoints.values() if str(row["step"]) == named]
    if not found:
        steps = {name: row["step"] for name, row in checkpoints.items()}
        raise NoSuchCheckpoint(
            f"expected the id or the step of a checkpoint of run {run!r}, found {named!r}; there are {steps!r}"
        )
    newest = max(found, key=lambda row: int(row["seq"]))
    if not {row["checkpoint_id"] for row in found} <= set(lineage_of(rows, newest["checkpoint_id"])):
        raise SpecInvalid(
            f"expected one checkpoint of run {run!r} at step {named}, found {[row['checkpoint_id'] for row in found]!r}: "
            "name one of these"
        )
    return newest


def last_seq_as_head(rows: Sequence[Row], checkpoint_id: str) -> int:
    """The last `seq` at which a checkpoint was the head: up to it, the rows are those of its branch as it was left."""
    return max(int(row["seq"]) for row in rows if row["head_after"] == checkpoint_id)


def left_by_rewinds(rows: Sequence[Row]) -> set[str]:
    """The checkpoints between the targets of rewinds and the heads that were left, wherever they stand now."""
    left: set[str] = set()
    for row in rows:
        if row["kind"] == "rewind":
            before = json.loads(row["detail"])["from"]
            left |= set(lineage_of(rows, before)) - set(lineage_of(rows, row["checkpoint_id"]))
    return left


def _rewinds_by_checkpoint(rows: Sequence[Row]) -> tuple[dict[str, tuple[Row, ...]], tuple[Row, ...]]:
    """Return checkpoint id -> the rewinds on its lineage, and those on the lineage of the next commit.

    A quarantine steps back along the lineage, perhaps beyond the rewind's target. Its branch continues nevertheless.
    """
    found: dict[str, tuple[Row, ...]] = {}
    now: tuple[Row, ...] = ()
    for row in rows:
        if row["kind"] == "checkpoint":
            found[row["checkpoint_id"]] = now
        elif row["kind"] == "rewind":
            now = (*found.get(row["checkpoint_id"], ()), row)
    return found, now


def _moves_head(row: Row) -> bool:
    """Return whether a row may have moved the head: a quarantine of rows names no checkpoint."""
    return row["kind"] == "rewind" or row["checkpoint_id"] is not None


def _exclusions(rewinds: Sequence[Row]) -> tuple[Exclusion, ...]:
    named = [Exclusion(**each) for row in rewinds for each in json.loads(row["detail"])["exclude"]]
    return tuple(dict.fromkeys(named))


def _check_changes(run: str, rows: Sequence[Row], target: Row, exclude: Sequence[Exclusion]) -> None:
    found, now = _rewinds_by_checkpoint(rows)
    wanted = tuple(dict.fromkeys([*_exclusions(found.get(target["checkpoint_id"], ())), *exclude]))
    if target["checkpoint_id"] == fence_of_rows(rows).head and wanted == _exclusions(now):
        raise SpecInvalid(
            f"expected another checkpoint than the head of run {run!r}, or rows to exclude, found "
            f"{'its beginning' if target is _BEGINNING else 'the head ' + repr(target['checkpoint_id'])} at step "
            f"{target['step']} as it is: nothing to rewind"
        )


def _make_row(target: Row, left: str | None, left_step: int, exclude: Sequence[Exclusion], why: str) -> Row:
    """Return the row that moves the head from the checkpoint `left` to `target`."""
    detail = {
        "from": left,
        "from_step": left_step,
        "exclude": [asdict(each) for each in exclude],
        "why": why,
    }
    return {
        "kind": "rewind",
        "checkpoint_id": target["checkpoint_id"],
        "step": target["step"],
        "detail": json.dumps(detail),
    }


def _one_left(run: str, left: dict[str, Row], named: str) -> Row:
    try:
        return checkpoint_of(run, list(left.values()), named)
    except NoSuchCheckpoint as err:
        raise SpecInvalid(
            f"expected a checkpoint of run {run!r} that is left behind and has no name, found {named!r}; left are "
            f"{sorted(left)!r}: on the surviving lineage checkpoint.keep_last says what is kept, and `dlac untag` takes a "
            "name away"
        ) from err


def _rewound(row: Row) -> Rewound:
    said = json.loads(row["detail"])
    return Rewound(
        checkpoint_id=row["checkpoint_id"],
        step=row["step"],
        left=said["from"],
        left_step=said["from_step"],
        attempt=row["attempt"],
    )
