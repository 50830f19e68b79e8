"""Choice of the memory state from which an attempt resumes, if a state provably continues the ledger's head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import Fence, checkpoint_rows, claim_of
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.memory_states.states import FindStates, MemoryState, memory_folder, read_states
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.spec.job_spec import JobSpec

_MOST_DEATHS = 2
"""Attempts that may die while they load one state. Then it may be the state's fault."""
DiedLoading = Callable[[str], bool]
"""Function that returns whether the attempt of a launch folder may have died while it loaded its state."""


def states_here(spec: JobSpec) -> list[MemoryState]:
    """Return the whole memory states of a run on this node, the newest first."""
    folder = memory_folder(spec)
    return [] if folder is None else read_states(folder)


def legs_of(states: Sequence[MemoryState]) -> list[Leg]:
    """Return the legs of memory states."""
    return [Leg.from_json(leg) for leg in dict.fromkeys(each.first.leg for each in states)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedState:
    """A memory state that a claim names, and the head that it continues: an empty row at the beginning of a run."""

    claim: ClaimRow
    state: MemoryState | None
    """None: it is lost by now."""
    head: CheckpointRow
    rows: list[LedgerRow]
    """The rows of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChoice:
    """Choice among the memory states of a run, for the attempt that replaces the attempt `replaced`."""

    run: str
    ledger: Ledger
    replaced: int
    find: FindStates
    died_loading: DiedLoading

    def choose(self, fence: Fence, *, leg: str) -> dict[str, Any]:
        """Return the fields of a `ClaimRow` for the newest state that may be taken with this fence and leg (as JSON), if any."""
        states = [each for each in self.find() if each.first.leg == leg]
        if not states:
            return {}
        rows = self._rows()
        head = _head_of(fence, rows)
        for state in states:
            if head is not None and may_resume(
                state, rows, head, replaced=self.replaced, died_loading=self.died_loading
            ):
                first, worked_on = state.first, sum(each.rows for each in state.ranks)
                named = {"memory_of": first.attempt, "memory_step": first.step, "memory_rows": worked_on}
                return {
                    **named,
                    "memory_ranks": first.world_size,
                    "memory_readers": first.readers,
                    "memory_stages": first.mesh.get("pp", 0),
                    "memory_at": first.saved_at,
                }
        return {}

    def find_claimed(self, fence: Fence, *, leg: str) -> ClaimedState | None:
        """Return the state that the claim of the present attempt names, if it has the leg, or None if the claim names none.

        The store is never read under a claim that names memory: a later attempt would take its steps for the state's steps.
        """
        rows = self._rows()
        claim, head = claim_of(rows, fence.attempt), _head_of(fence, rows)
        if not claim.memory_of or head is None:
            return None
        found = (each for each in self.find() if _name_of(each) == _taken_by(claim) and each.first.leg == leg)
        return ClaimedState(claim=claim, state=next(found, None), head=head, rows=rows)

    def _rows(self) -> list[LedgerRow]:
        return self.ledger.rows(self.run, kinds=HEAD_KINDS)


def _name_of(state: MemoryState) -> tuple[int, int, float]:
    return state.first.attempt, state.first.step, state.first.saved_at


def _taken_by(claim: ClaimRow) -> tuple[int, int, float]:
    return claim.memory_of, claim.memory_step, claim.memory_at


def _head_of(fence: Fence, rows: list[LedgerRow]) -> CheckpointRow | None:
    """Return the row of the head, an empty one before the first checkpoint, or None if the rows lack it."""
    return CheckpointRow() if fence.head is None else checkpoint_rows(rows).get(fence.head)


def may_resume(
    state: MemoryState, rows: Sequence[LedgerRow], head: CheckpointRow, *, replaced: int, died_loading: DiedLoading
) -> bool:
    """Return whether an attempt may resume from a whole state of a run with these rows, instead of the attempt `replaced`."""
    first, before = state.first, claim_of(rows, replaced)
    owner = claim_of(rows, first.attempt)
    # An attempt that was replaced may still run, and write other states: only the one that was taken then counts.
    taken_by = [row for row in rows if isinstance(row, ClaimRow) and _taken_by(row) == _name_of(state)]
    deaths = sum(died_loading(row.launch_folder) for row in taken_by)
    is_taken_again = _taken_by(before) == _name_of(state) and deaths < _MOST_DEATHS
    is_of_replaced = before.trains and (first.attempt == before.attempt or is_taken_again)
    is_of_its_launch = first.attempt > 0 and first.nonce == owner.nonce
    is_named = (head.checkpoint_id or None) == first.head
    is_committed_since = (head.attempt, head.nonce) == (first.attempt, first.nonce)
    # A state of the head's own step that was kept once the head's checkpoint had begun is the state of that checkpoint.
    is_at_head = first.step >= head.step and state.trained_since(head.step) is not None
    return is_of_replaced and is_of_its_launch and (is_named or is_committed_since) and is_at_head
