"""Facts from the rows of one run, all of one read: its owner, its head, and its restorable checkpoints."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TypeVar

from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, NoSuchRun, SpecInvalid
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow, QuarantinedCheckpointRow

R = TypeVar("R", bound=LedgerRow)
_NAMED = 5
"""Checkpoints that a message names, at the most."""
_RUNS_NAMED = 10
"""Runs that a message names, at the most."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run_name(run: str) -> str:
    """Return the name of a run, also of its folder. Raises `SpecInvalid` if a run cannot have it: the one rule for all."""
    if not _RUN_NAME.fullmatch(run):
        raise SpecInvalid(
            "expected the name of a run: 1-100 letters, digits, '.', '_' or '-', starting with a letter or digit, found "
            f"{run!r}: choose such a name"
        )
    return run


def no_such_run(run: str, runs: Sequence[str]) -> NoSuchRun:
    """Return the error that the ledger, which has `runs`, has no row of a run: with names like it, or the first ones."""
    close = get_close_matches(run, runs, n=3) or [each for each in runs if each.casefold() == run.casefold()]
    if close:
        found = f"none: did you mean {' or '.join(map(repr, close))}?"
    elif not runs:
        found = "no run: begin one with `dlac train`"
    else:
        more = f" and {len(runs) - _RUNS_NAMED} more" if len(runs) > _RUNS_NAMED else ""
        found = f"only {list(runs[:_RUNS_NAMED])!r}{more}: name one of these, or begin the run with `dlac train`"
    return NoSuchRun(f"expected a run named {run!r} in the ledger, found {found}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """Owner of a run, length of its ledger, and its head."""

    attempt: int = 0
    nonce: str = ""
    seq: int = 0
    head: str | None = None


def translate_row(row: R, uri: Callable[[str], str], path: Callable[[str], str]) -> R:
    """Return a row whose places are translated: addresses by `uri`, folders by `path`."""
    if isinstance(row, CheckpointRow) and row.manifest_uri:
        return replace(row, manifest_uri=uri(row.manifest_uri))
    if isinstance(row, ClaimRow):
        store = path(row.store) if row.store.startswith("/") else uri(row.store)
        return replace(row, local=path(row.local), launch_folder=path(row.launch_folder), store=store)
    return row


def checkpoint_rows(rows: Iterable[LedgerRow]) -> dict[str, CheckpointRow]:
    """Checkpoint id -> its checkpoint row."""
    return {row.checkpoint_id: row for row in rows if isinstance(row, CheckpointRow)}


def claim_of(rows: Iterable[LedgerRow], attempt: int) -> ClaimRow:
    """Return the claim of an attempt. Of attempt 0 and without values if there is none."""
    return [ClaimRow(), *(row for row in rows if isinstance(row, ClaimRow) and row.attempt == attempt)][-1]


def trained_by(rows: Sequence[LedgerRow], attempt: int, step: int) -> int:
    """Return the attempt that trained a step of a checkpoint of `attempt`: one whose memory state that attempt resumed from."""
    claim = claim_of(rows, attempt)
    while step <= claim.memory_step:
        claim = claim_of(rows, claim.memory_of)
    return claim.attempt or attempt


def lineage_of(rows: Sequence[LedgerRow], checkpoint_id: str | None) -> list[str]:
    """A checkpoint and its ancestors that these rows have, the newest first."""
    checkpoints = checkpoint_rows(rows)
    found: list[str] = []
    while checkpoint_id is not None and checkpoint_id in checkpoints:
        found.append(checkpoint_id)
        checkpoint_id = checkpoints[checkpoint_id].parent
    return found


def out_of(rows: Sequence[LedgerRow]) -> set[str]:
    """Ids of the checkpoints that are retired or damaged."""
    return {row.checkpoint_id for row in rows if isinstance(row, typed_rows.RetireRow | QuarantinedCheckpointRow)}


def restorable_rows(rows: Sequence[LedgerRow]) -> dict[str, CheckpointRow]:
    """Checkpoint id -> its row, without retired and damaged ones."""
    out = out_of(rows)
    return {name: row for name, row in checkpoint_rows(rows).items() if name not in out}


def way_out(run: str, rows: Sequence[LedgerRow]) -> str:
    """Return advice for a run without a restorable checkpoint on its lineage: abandoned branches may be whole.

    A run that was not adopted or forked, and so has no checkpoint of step 0, can begin again.
    """
    begins = all(row.step > 0 for row in checkpoint_rows(rows).values())
    others = (
        f"begin it again with `dlac rewind {run} --to-step 0`, " if begins else ""
    ) + "or start a run under another name"
    kept = sorted(restorable_rows(rows).values(), key=lambda row: (row.step, row.seq), reverse=True)
    if not kept:
        return others.removeprefix("or ")
    listed = ", ".join(f"{row.checkpoint_id} (step {row.step})" for row in kept[:_NAMED])
    return f"abandoned branches still have {listed}: resume from one with `dlac rewind {run} --checkpoint ID`, {others}"


def restorable(
    run: str, rows: Sequence[LedgerRow], step: int | None, *, checkpoint_id: str | None = None
) -> CheckpointRow:
    """Return the row of the head, or of the checkpoint of a step or with an id. Raises as `Ledger.restorable`.

    If a run passed the step twice, it is the one on the surviving lineage, else the newest.
    """
    if not rows:
        raise NoSuchRun(f"expected a run named {run!r} in the ledger, found none: `dlac runs` lists those that it has")
    kept, head = restorable_rows(rows), fence_of_rows(rows).head
    named = head if step is None and checkpoint_id is None else checkpoint_id
    wanted = [name for name, row in kept.items() if (name == named if step is None else row.step == step)]
    if not wanted:
        wish = f" {checkpoint_id!r}" if checkpoint_id is not None else "" if step is None else f" at step {step}"
        listed = sorted(row.step for row in kept.values()) if checkpoint_id is None else sorted(kept)
        raise NoSuchCheckpoint(
            f"expected a checkpoint of run {run!r}{wish} that is kept, found "
            + (f"those of steps {listed!r}" if checkpoint_id is None else f"{listed!r}")
        )
    surviving = set(lineage_of(rows, head))
    return kept[max(wanted, key=lambda name: (name in surviving, kept[name].seq))]


def fence_of_rows(rows: Sequence[LedgerRow]) -> Fence:
    """The fence that a run's rows imply: the last claim owns it, the greatest `seq` names the head."""
    if not rows:
        return Fence()
    last = max(rows, key=lambda row: row.seq)
    claim = max((row for row in rows if isinstance(row, ClaimRow)), key=lambda row: row.seq, default=last)
    return Fence(attempt=claim.attempt, nonce=claim.nonce, seq=last.seq, head=last.head_after)


def finished_of_rows(rows: Sequence[LedgerRow]) -> bool:
    """Return True if a run's rows show that it is finished, and no later rewind opened it again."""
    turns = [row for row in rows if isinstance(row, typed_rows.FinishRow | typed_rows.RewindRow)]
    return isinstance(max(turns, key=lambda row: row.seq, default=None), typed_rows.FinishRow)
