"""Start of an attempt: resolve the leg, claim the run, restore the state. A start that was killed can be repeated."""

import threading
import time
from dataclasses import replace

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.checkpoint.restore.verified_copy import Verify, verify_here
from dlac_pipeline.checkpoint.store import Tiers, tiers_of
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_store
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
from dlac_pipeline.memory_states.choose import legs_of
from dlac_pipeline.plan.legs.committed_leg import leg_of, skipped_in
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.start.claim import Claimed, claim_attempt
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.resolve import Resolved, Resolver
from dlac_pipeline.supervise.start.restore import Verifying, restore_newest
from dlac_pipeline.supervise.start.resume_points import point_in_memory, point_of_newest


def start_attempt(
    plans: Plans,
    spec: JobSpec,
    request: ClaimRequest,
    *,
    verifying: Verifying = lambda step, done, total: None,
    verify: Verify = verify_here,
    stop: threading.Event | None = None,
) -> ResumePoint:
    """Resolve the leg, claim the run, restore the state to resume from, and return the resume point.

    The sources of a new run are planned before the claim, unless the request has their plans.

    - `verifying` receives the progress of the verification of a checkpoint. Its exception ends the claim.
    - `verify` is as for `restore`.
    - Once `stop` is set, the claim does not wait for an unavailable catalog.

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
    leg = resolved.leg
    point: ResumePoint
    if claimed.memory is None:
        leg, point = _from_checkpoint(resolver, claimed, resolved, tiers, verifying=verifying, verify=verify)
    else:
        point = point_in_memory(claimed, claimed.memory, resolved)
    if resolver.defers_tables:
        resolver.check_tables(leg)
    verify_s = time.monotonic() - claimed_at
    if spec.launch.on_skipped == "replay":
        rows = ledger.rows(spec.run, kinds=HEAD_KINDS)
        point = replace(point, skipped=skipped_in(leg, ledger, rows, point.checkpoint_id))
    point = replace(point, spike_step=request.options.spike_step, copies_at_once=request.options.copies_at_once)
    return replace(point, claim_s=claimed_at - began, verify_s=verify_s)


def _from_checkpoint(
    resolver: Resolver, claimed: Claimed, resolved: Resolved, tiers: Tiers, *, verifying: Verifying, verify: Verify
) -> tuple[Leg, ResumePoint]:
    """Restore the newest whole checkpoint, and resolve its leg. The claim stays, so that no other head can follow."""
    ledger = resolver.ledger
    if claimed.head not in (resolved.head, None):  # the replaced attempt committed a checkpoint since then
        rows = ledger.rows(claimed.attempt.run, kinds=HEAD_KINDS)
        resolver.check(leg_of(rows, claimed.head), rows)
    newest = restore_newest(ledger, claimed, tiers, verifying=verifying, verify=verify)
    while not resolved.is_for(newest.head):
        resolved = resolver.resolve_at(newest.rows, newest.manifest)
    return resolved.leg, point_of_newest(claimed, resolved.leg, newest)
