"""Start of an attempt: resolve the leg, claim the run, restore the state. A start that was killed can be repeated."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dlac_pipeline.checkpoint.restore.verified_copy import Restored, Verify, restore, verify_here
from dlac_pipeline.checkpoint.store import Tiers, tiers_of
from dlac_pipeline.lakehouse.ledger.branches import moves_back
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_store
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, LedgerRow
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.memory.memory_choice import legs_of
from dlac_pipeline.supervise.start.claim import Claimed, claim_attempt
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.resolve import Resolved, Resolver
from dlac_pipeline.supervise.start.restore import NewestWhole, RestoreRow, restore_newest
from dlac_pipeline.supervise.start.resume_point import FreshStart, FromCheckpoint, FromMemory, ResumePoint

Verifying = Callable[[int, int, int], None]
"""Callback for progress: the checkpoint's step, its verified bytes so far, and all its bytes."""


def start_attempt(
    plans: Plans,
    spec: JobSpec,
    request: ClaimRequest,
    *,
    verifying: Verifying = lambda step, done, total: None,
    verify: Verify = verify_here,
    stop: threading.Event | None = None,
    on_claim: Callable[[], None] = lambda: None,
) -> ResumePoint:
    """Resolve the leg, claim the run, restore the state to resume from, and return the resume point.

    The sources of a new run are planned before the claim, unless the request has their plans.

    - `verifying` receives the progress of the verification of a checkpoint. Its exception ends the claim.
    - `verify` is as for `restore`.
    - Once `stop` is set, the claim does not wait for an unavailable catalog.
    - `on_claim` is called once the run is claimed, before the checkpoint is verified.

    Raises:
        CommitOutcomeUnknown: the run may or may not be claimed.
        SteppedAside, RunFinished: from the claim.
        LedgerOlderThanStore: the catalog was restored from an older backup. Nothing was claimed.
        ResumeMismatch: the spec differs from the run's leg. Nothing was claimed, unless the head only looked damaged.
        NoRestorableCheckpoint: every checkpoint of the lineage is damaged.
        AppendHistoryLost: rows appended to a followed table cannot be identified any more. Nothing was claimed.
        NoSuchTable, TableReplaced, PinLost, DataFileChanged: not the planned sources. A recovery has claimed the run.
    """
    began = time.monotonic()
    ledger, tiers = Ledger(plans.lakehouse, stop=stop), tiers_of(spec)
    check_store(ledger, spec.run, tiers.durable_run(), tiers.files)
    resolver = Resolver(ledger, plans, spec, request.options, recovering=request.replaces is not None)
    before = ledger.state(spec.run).fence
    resolved = resolver.resolve(before.head, lambda: legs_of(request.states_of(spec)))
    claimed = claim_attempt(ledger, spec, request, resolved, before, tiers)
    claimed_at = time.monotonic()
    on_claim()
    leg, point = resolved.leg, _from_memory(claimed, resolved)
    if point is None:
        restore_row = partial(_restore_row, tiers=tiers, verifying=verifying, verify=verify)
        leg, point = _from_checkpoint(resolver, claimed, resolved, tiers, restore_row)
    if resolver.defers_tables:
        resolver.check_tables(leg)
    verify_s = time.monotonic() - claimed_at
    return replace(point, spike_step=request.options.spike_step, claim_s=claimed_at - began, verify_s=verify_s)


def _restore_row(row: CheckpointRow, *, tiers: Tiers, verifying: Verifying, verify: Verify) -> Restored:
    return restore(row, tiers, partial(verifying, row.step), verify=verify)


def _from_checkpoint(
    resolver: Resolver, claimed: Claimed, resolved: Resolved, tiers: Tiers, restore_row: RestoreRow
) -> tuple[Leg, ResumePoint]:
    """Restore the newest whole checkpoint, and resolve its leg. The claim stays, so that no other head can follow."""
    ledger = resolver.ledger
    if claimed.head not in (resolved.head, None):  # the replaced attempt committed a checkpoint since then
        rows = ledger.rows(claimed.attempt.run, kinds=HEAD_KINDS)
        resolver.check(leg_of(rows, claimed.head), rows)
    newest = restore_newest(ledger, claimed, tiers, restore_row)
    while not resolved.is_for(newest.head):
        resolved = resolver.resolve_at(newest.rows, newest.manifest)
    return resolved.leg, _from_newest(claimed, resolved.leg, newest)


def _from_memory(claimed: Claimed, resolved: Resolved) -> ResumePoint | None:
    """Return the resume point at the state in memory that the claim names, or None if it names none."""
    chosen = claimed.memory
    if chosen is None:
        return None
    claim, state, head = chosen.claim, chosen.state, chosen.head
    return FromMemory(
        **_facts(claimed, resolved.leg, chosen.rows, head.checkpoint_id),
        step=claim.memory_step,
        memory_of=claim.memory_of,
        memory_at=claim.memory_at,
        folder="" if state is None else str(state.folder),
        world_size=claim.memory_ranks,
        engine="" if state is None else state.first.engine,
        checkpoint_id=head.checkpoint_id or None,
        head_step=head.step,
        head_at=(head if head.checkpoint_id else chosen.rows[0]).committed_at.timestamp(),
        manifest_uri=head.manifest_uri,
        head_damage=resolved.damage,
    )


def _from_newest(claimed: Claimed, leg: Leg, newest: NewestWhole) -> FreshStart | FromCheckpoint:
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
    }


def _facts(claimed: Claimed, leg: Leg, rows: list[LedgerRow], head: str) -> dict[str, Any]:
    """Return the fields that each resume point has. `head` is the checkpoint that it continues, or empty."""
    committed = leg_of(rows, head) if head else None
    moves, last = moves_back(rows), max((row.seq for row in checkpoint_rows(rows).values()), default=0)
    return {
        "attempt": claimed.attempt.number,
        "nonce": claimed.attempt.nonce,
        "replaces": claimed.replaces,
        "leg": leg.to_json(),
        "leg_is_new": committed is None or leg.index != committed.index,
        "leaves_out_more": leg.leaves_out_more_than(committed),
        "branch": moves[-1].branch if moves else 1,
        "went_back": [each.row.attempt for each in moves if each.row.seq > last],
    }
