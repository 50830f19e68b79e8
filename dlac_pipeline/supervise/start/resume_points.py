"""Resume points of a claimed attempt: the facts of the states that its ranks load."""

import socket
from typing import Any

from dlac_pipeline.checkpoint.interval_choice import Cost, Failures
from dlac_pipeline.checkpoint.restore.resume_point import FreshStart, FromCheckpoint, FromMemory
from dlac_pipeline.checkpoint.restore.verified_copy import Restored
from dlac_pipeline.lakehouse.ledger.branches import moves_back
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, LedgerRow
from dlac_pipeline.memory_states.choose import ClaimedState
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.supervise.start.claim import Claimed
from dlac_pipeline.supervise.start.resolve import Resolved
from dlac_pipeline.supervise.start.restore import NewestWhole


def point_in_memory(claimed: Claimed, chosen: ClaimedState, resolved: Resolved) -> FromMemory:
    """Return the resume point at the state in memory that the claim names."""
    claim, state, head = chosen.claim, chosen.state, chosen.head
    return FromMemory(
        **_facts(claimed, resolved.leg, chosen.rows, head.checkpoint_id),
        step=claim.memory_step,
        memory_of=claim.memory_of,
        memory_at=claim.memory_at,
        folder="" if state is None else str(state.folder),
        world_size=claim.memory_ranks,
        engine="" if state is None else state.first.engine,
        loads_own_files=state is not None and state.first.loads_own_files,
        checkpoint_id=head.checkpoint_id or None,
        head_step=head.step,
        head_at=(head if head.checkpoint_id else chosen.rows[0]).committed_at.timestamp(),
        manifest_uri=head.manifest_uri,
        head_damage=resolved.damage,
        sources=[] if state is None else state.sources,
        mesh={} if state is None else state.first.mesh,
    )


def point_of_newest(claimed: Claimed, leg: Leg, newest: NewestWhole) -> FreshStart | FromCheckpoint:
    """Return the resume point at the newest whole checkpoint of a claimed run, or at its beginning."""
    facts = {**_facts(claimed, leg, newest.rows, newest.head or ""), "quarantined": newest.quarantined}
    if newest.restored is None:
        return FreshStart(**facts)
    rows = checkpoint_rows(newest.rows)
    return FromCheckpoint(**facts, **checkpoint_facts(newest.restored, rows[newest.restored.manifest.checkpoint_id]))


def checkpoint_facts(restored: Restored, row: CheckpointRow) -> dict[str, Any]:
    """Return the fields of a `FromCheckpoint` for a checkpoint whose verified files are on this node."""
    manifest = restored.manifest
    return {
        "step": manifest.step,
        "checkpoint_id": manifest.checkpoint_id,
        "folder": str(restored.folder),
        "host": socket.gethostname(),
        "manifest_uri": row.manifest_uri,
        "manifest_digest": row.manifest_digest,
        "world_size": manifest.world_size,
        "engine": manifest.engine,
        "reader_state": manifest.reader_state,
        "mesh": manifest.mesh,
    }


def _facts(claimed: Claimed, leg: Leg, rows: list[LedgerRow], head: str) -> dict[str, Any]:
    """Return the fields that each resume point has. `head` is the checkpoint that it continues, or empty."""
    committed = leg_of(rows, head) if head else None
    moves, last = moves_back(rows), max((row.seq for row in checkpoint_rows(rows).values()), default=0)
    failures, cost = Failures.of_rows(rows), Cost.of_rows(rows)
    return {
        "attempt": claimed.attempt.number,
        "nonce": claimed.attempt.nonce,
        "replaces": claimed.replaces,
        "leg": leg.to_json(),
        "leg_is_new": committed is None or leg.index != committed.index,
        "leaves_out_more": leg.leaves_out_more_than(committed),
        "branch": moves[-1].branch if moves else 1,
        "went_back": [each.row.attempt for each in moves if each.row.seq > last],
        "failures": failures.count,
        "trained_s": failures.trained_s,
        "checkpoint_cost": [] if cost is None else [cost.lost_s, cost.total_s],
    }
