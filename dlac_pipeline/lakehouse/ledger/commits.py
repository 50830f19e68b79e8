"""Rules of appends to a run's ledger: claim, checkpoint, quarantine, name, export, finish."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.run_rows import Fence, no_such_run, restorable


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A launch of a run. `nonce` distinguishes it from any other launch with the same number."""

    run: str
    number: int
    nonce: str


def new_nonce() -> str:
    """Return a name for one launch that no other launch has."""
    return secrets.token_hex(4)


def claim(
    ledger: Ledger,
    run: str,
    *,
    nonce: str,
    replaces: int,
    facts: Mapping[str, Any] = {},
    choose: Callable[[Fence], dict[str, Any]] = lambda _: {},
) -> RunState:
    """Make `nonce` the owner of the run, in place of attempt number `replaces`. `facts` are further fields of its `ClaimRow`.

    `choose` gives such fields for the fence that is replaced, in the append itself. Raises `SteppedAside` if another recovery
    claimed the run since attempt `replaces`, or `RunFinished`.
    """

    def decide(state: RunState) -> Append | None:
        fence = state.fence
        if fence.nonce == nonce:
            return None
        check_unfinished(state)
        check_current(state, replaces)
        mine = Fence(attempt=fence.attempt + 1, nonce=nonce, seq=fence.seq + 1, head=fence.head)
        return Append(rows=[typed_rows.ClaimRow(replaces=replaces, **facts, **choose(fence))], fence=mine)

    return ledger.append(run, decide)


def commit_checkpoint(
    ledger: Ledger,
    attempt: Attempt,
    *,
    checkpoint_id: str,
    parent: str | None,
    rows: Sequence[typed_rows.LedgerRow],
    seq: int | None = None,
) -> RunState:
    """Append a checkpoint's rows and make it the head, exactly once, however often the commit is repeated.

    `seq` is the run's last that `rows` were made from, or None if they depend on no others.

    Raises:
        RowsBetween: the run has rows after `seq`. Make the rows again from all rows.
        Fenced: a newer attempt owns the run.
        HeadMoved: the head is neither `parent` nor this checkpoint.
    """

    def decide(state: RunState) -> Append | None:
        check_mine(state, attempt)
        fence = state.fence
        if fence.head == checkpoint_id:
            return None
        if fence.head != parent:
            raise errors.HeadMoved(
                f"expected {parent!r} to be the head of run {attempt.run!r} under attempt {attempt.number}, found {fence.head!r}"
            )
        if seq is not None and fence.seq != seq:
            raise errors.RowsBetween(f"expected {seq} to be the last seq of run {attempt.run!r}, found {fence.seq}")
        return Append(rows=rows, fence=replace(fence, seq=fence.seq + 1, head=checkpoint_id))

    return ledger.append(attempt.run, decide)


def quarantine(ledger: Ledger, attempt: Attempt, *, damaged: dict[str, str], head_after: str | None) -> RunState:
    """Record damaged checkpoints (id -> reason) before an attempt's first one, and step the head back. Raises `Fenced`."""

    def decide(state: RunState) -> Append | None:
        check_mine(state, attempt)
        if state.fence.head == head_after:
            return None
        rows = [typed_rows.QuarantinedCheckpointRow(checkpoint_id=each, reason=why) for each, why in damaged.items()]
        return Append(rows=rows, fence=replace(state.fence, seq=state.fence.seq + 1, head=head_after))

    return ledger.append(attempt.run, decide)


def finish(ledger: Ledger, attempt: Attempt, *, step: int) -> RunState:
    """Mark the run finished at its head and drop the fence property. Raises `Fenced` if a newer attempt owns the run."""

    def decide(state: RunState) -> Append | None:
        if state.finished and state.fence.nonce == attempt.nonce:
            return None
        check_mine(state, attempt)
        return replace(beside(state, [typed_rows.FinishRow(step=step)]), finished=True)

    return ledger.append(attempt.run, decide)


def name_checkpoint(
    ledger: Ledger, run: str, name: str, *, step: int | None = None, checkpoint_id: str | None = None
) -> str:
    """Name the checkpoint of a step or with an id, or the head. Retention keeps it while it has a name. Return its id.

    Raises `NoSuchRun`, `NoSuchCheckpoint` if none can be restored, or `SpecInvalid` if another checkpoint has the name.
    """
    named = ""

    def decide(state: RunState) -> Append | None:
        nonlocal named
        if not state.exists:
            raise no_such_run(run, ledger.runs())
        rows = ledger.rows_at(state, kinds=typed_rows.HEAD_KINDS)
        named = restorable(run, rows, step, checkpoint_id=checkpoint_id).checkpoint_id
        holder = names_of(rows).get(name)
        if holder == named:
            return None
        if holder is not None:
            raise errors.SpecInvalid(
                f"expected {name!r} to tag no checkpoint of run {run!r}, found it tags {holder!r}: choose another tag, or "
                "remove this one with `dlac checkpoint untag`"
            )
        return beside(state, [typed_rows.NameRow(checkpoint_id=named, name=name)])

    ledger.append(run, decide)
    return named


def record_exports(ledger: Ledger, run: str, exports: Sequence[typed_rows.ExportRow]) -> None:
    """Record files that were made from a checkpoint. Each once, however often it is made."""

    def decide(state: RunState) -> Append | None:
        known = {row.digest for row in ledger.rows_at(state, kinds=(typed_rows.ExportRow,))}
        new = [row for row in exports if row.digest not in known]
        return beside(state, new) if new else None

    ledger.append(run, decide)


def unname_checkpoint(ledger: Ledger, run: str, name: str) -> str:
    """Remove a name. Return the id of the checkpoint that had it. Raises `NoSuchRun` or `NoSuchCheckpoint`."""
    removed = ""

    def decide(state: RunState) -> Append | None:
        nonlocal removed
        if not state.exists:
            raise no_such_run(run, ledger.runs())
        names = names_of(ledger.rows_at(state, kinds=(typed_rows.NameRow,)))
        if name not in names:
            if removed:
                return None  # an earlier try has landed
            raise errors.NoSuchCheckpoint(
                f"expected a checkpoint of run {run!r} with tag {name!r}, found the tags {sorted(names)!r}"
            )
        removed = names[name]
        return beside(state, [typed_rows.NameRow(name=name)])

    ledger.append(run, decide)
    return removed


@contextmanager
def keep_checkpoint(
    ledger: Ledger, run: str, name: str, *, step: int | None = None, checkpoint_id: str | None = None
) -> Iterator[typed_rows.CheckpointRow]:
    """Keep a checkpoint, or the head, from the retention of its run, which may be training. Yield its row.

    A process that is killed inside leaves the name, and so the checkpoint, until `name` is used again or removed.
    Raises `NoSuchRun`, or `NoSuchCheckpoint` for one that does not exist or was retired or found damaged since then.
    """
    target = ledger.restorable(run, step, checkpoint_id=checkpoint_id).checkpoint_id
    if names_of(ledger.rows(run, kinds=(typed_rows.NameRow,))).get(name, target) != target:
        unname_checkpoint(ledger, run, name)  # of one that was killed
    named = name_checkpoint(ledger, run, name, step=step, checkpoint_id=checkpoint_id)  # the head as it is now
    try:
        yield ledger.restorable(run, checkpoint_id=named)
    finally:
        with suppress(errors.NoSuchCheckpoint):  # an operator took it away
            unname_checkpoint(ledger, run, name)


def names_of(rows: Sequence[typed_rows.LedgerRow]) -> dict[str, str]:
    """Name -> id of the checkpoint that has it, from rows in order of `seq`."""
    names: dict[str, str] = {}
    for row in rows:
        if isinstance(row, typed_rows.NameRow):
            names.pop(row.name, None)
            if row.checkpoint_id is not None:
                names[row.name] = row.checkpoint_id
    return names


def beside(state: RunState, rows: Sequence[typed_rows.LedgerRow]) -> Append:
    """Return rows that leave owner and head unchanged. The owner of the run continues after them."""
    return Append(rows=rows, fence=replace(state.fence, seq=state.fence.seq + 1), finished=state.finished)


def check_mine(state: RunState, attempt: Attempt) -> None:
    """Raise `Fenced` unless `attempt` still owns the run."""
    fence = state.fence
    if state.finished or (fence.attempt, fence.nonce) != (attempt.number, attempt.nonce):
        raise errors.Fenced(
            f"attempt {attempt.number} ({attempt.nonce}) of run {attempt.run!r} is fenced off: the run is "
            f"{'finished' if state.finished else 'owned'} by attempt {fence.attempt} ({fence.nonce}); this one stops for good"
        )


def check_current(state: RunState, attempt: int | None) -> None:
    """Raise `SteppedAside` if `attempt` is set and no longer the current one: another launch claimed the run."""
    current = state.fence.attempt
    if attempt is not None and current != attempt:
        raise errors.SteppedAside(
            f"expected attempt {attempt} of run {state.run!r} to be the current one, found attempt {current}: another launch "
            "owns the run; nothing to do"
        )


def check_unfinished(state: RunState) -> None:
    """Raise `RunFinished` if the run is finished, and so accepts no other attempt."""
    if state.finished:
        raise errors.RunFinished(
            f"run {state.run!r} is finished at checkpoint {state.fence.head!r} and takes no more attempts"
        )
