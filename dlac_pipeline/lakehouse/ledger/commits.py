"""Rules of appends to a run's ledger: claim, checkpoint, quarantine, finish."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.run_rows import Fence


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
