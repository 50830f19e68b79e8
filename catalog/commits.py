"""What may be appended to a run's ledger, and when: claim, checkpoint, quarantine, finish (design.md sections 6.4 and 7)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from catalog.errors import Fenced, HeadMoved, RunFinished, SteppedAside
from catalog.ledger import Append, Fence, Ledger, Row, RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One launch of a run; `nonce` tells it from any other launch with the same number."""

    run: str
    number: int
    nonce: str


def claim(ledger: Ledger, run: str, *, nonce: str, replaces: int, detail: dict[str, Any]) -> RunState:
    """Make `nonce` the owner of the run, in place of attempt number `replaces`.

    Raises:
        SteppedAside: attempt `replaces` is no longer the current one: somebody else recovers the run.
        RunFinished: the run is finished.
    """

    def decide(state: RunState) -> Append | None:
        fence = state.fence
        if fence.nonce == nonce:
            return None
        if state.finished:
            raise RunFinished(f"run {run!r} is finished at checkpoint {fence.head!r} and takes no more attempts")
        if fence.attempt != replaces:
            raise SteppedAside(
                f"expected attempt {replaces} of run {run!r} to be the current one, found attempt {fence.attempt}: "
                "another launch owns the run; nothing to do"
            )
        mine = Fence(attempt=fence.attempt + 1, nonce=nonce, seq=fence.seq + 1, head=fence.head)
        return Append(rows=[{"kind": "claim", "detail": json.dumps({"replaces": replaces, **detail})}], fence=mine)

    return ledger.append(run, decide)


def commit_checkpoint(
    ledger: Ledger, attempt: Attempt, *, checkpoint_id: str, parent: str | None, rows: Sequence[Row]
) -> RunState:
    """Append a checkpoint's rows and make it the head; exactly once, however often the commit is repeated.

    Raises:
        Fenced: a newer attempt owns the run.
        HeadMoved: the head is neither `parent` nor this checkpoint.
    """

    def decide(state: RunState) -> Append | None:
        check_mine(state, attempt)
        fence = state.fence
        if fence.head == checkpoint_id:
            return None
        if fence.head != parent:
            raise HeadMoved(
                f"expected {parent!r} to be the head of run {attempt.run!r} under attempt {attempt.number}, found {fence.head!r}"
            )
        return Append(rows=rows, fence=replace(fence, seq=fence.seq + 1, head=checkpoint_id))

    return ledger.append(attempt.run, decide)


def quarantine(ledger: Ledger, attempt: Attempt, *, damaged: dict[str, str], head_after: str | None) -> RunState:
    """Record damaged checkpoints (id -> reason) and step the head back to `head_after`, before the first checkpoint.

    Raises:
        Fenced: a newer attempt owns the run.
    """

    def decide(state: RunState) -> Append | None:
        check_mine(state, attempt)
        if state.fence.head == head_after:
            return None
        rows = [
            {"kind": "quarantine", "checkpoint_id": checkpoint_id, "detail": json.dumps({"reason": reason})}
            for checkpoint_id, reason in damaged.items()
        ]
        return Append(rows=rows, fence=replace(state.fence, seq=state.fence.seq + 1, head=head_after))

    return ledger.append(attempt.run, decide)


def finish(ledger: Ledger, attempt: Attempt, *, step: int) -> RunState:
    """Mark the run finished at its head and drop the fence property.

    Raises:
        Fenced: a newer attempt owns the run.
    """

    def decide(state: RunState) -> Append | None:
        if state.finished and state.fence.nonce == attempt.nonce:
            return None
        check_mine(state, attempt)
        return Append(
            rows=[{"kind": "finish", "step": step}], fence=replace(state.fence, seq=state.fence.seq + 1), finished=True
        )

    return ledger.append(attempt.run, decide)


def check_mine(state: RunState, attempt: Attempt) -> None:
    """Check that `attempt` still owns the run.

    Raises:
        Fenced: it does not.
    """
    fence = state.fence
    if state.finished or (fence.attempt, fence.nonce) != (attempt.number, attempt.nonce):
        raise Fenced(
            f"attempt {attempt.number} ({attempt.nonce}) of run {attempt.run!r} is fenced off: the run is "
            f"{'finished' if state.finished else 'owned'} by attempt {fence.attempt} ({fence.nonce}); this one stops for good"
        )
