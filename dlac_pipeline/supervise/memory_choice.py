"""The memory state from which an attempt resumes, if one on this node provably continues the ledger's head."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.memory.states import MemoryState, read_states
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import Fence, checkpoint_rows, claim_of
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, LedgerRow


@dataclass(frozen=True, slots=True)
class MemoryHead:
    """A memory state, and the head that it continues. At the beginning of a run the row of the head is empty."""

    state: MemoryState
    head: CheckpointRow
    rows: list[LedgerRow]
    """The rows of the run that it was chosen from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChoice:
    """Choice among the memory states of a run on this node, for the attempt that replaces the attempt `replaced`."""

    folder: Path | None
    ledger: Ledger
    run: str
    replaced: int

    def detail(self, fence: Fence, leg: str) -> dict[str, Any]:
        """Return the fields of a `ClaimRow` for the state that would be taken with this fence."""
        found = self.find(fence, leg)
        if found is None:
            return {}
        first = found.state.first
        return {
            "memory_of": first.attempt,
            "memory_step": first.step,
            "memory_ranks": first.world_size,
            "memory_at": first.saved_at,
        }

    def find(self, fence: Fence, leg: str) -> MemoryHead | None:
        """Return the newest state that may be taken with this fence and leg (as JSON), or None."""
        found = [] if self.folder is None else read_states(self.folder)
        if not found:
            return None
        rows = self.ledger.rows(self.run, kinds=HEAD_KINDS)
        head = CheckpointRow() if fence.head is None else checkpoint_rows(rows).get(fence.head)
        if head is None:
            return None
        may = (each for each in found if each.first.leg == leg and may_resume(each, rows, head, replaced=self.replaced))
        return next((MemoryHead(each, head, rows) for each in may), None)


def may_resume(state: MemoryState, rows: Sequence[LedgerRow], head: CheckpointRow, *, replaced: int) -> bool:
    """Return whether an attempt may resume from a whole state of a run with these rows, instead of the attempt `replaced`."""
    first, before = state.first, claim_of(rows, replaced)
    owner = claim_of(rows, first.attempt)
    is_of_replaced = first.attempt in (before.attempt, before.memory_of) and before.trains
    is_of_its_launch = first.attempt > 0 and first.nonce == owner.nonce
    is_named = (head.checkpoint_id or None) == first.head
    is_committed_since = (head.attempt, head.nonce) == (first.attempt, first.nonce)
    is_newer = first.step > head.step and state.trained_since(head.step) is not None
    return is_of_replaced and is_of_its_launch and (is_named or is_committed_since) and is_newer
