"""Recovery coordinator: claim the run, find the checkpoint to resume from, and verify it. A killed recovery can be repeated."""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from dlac_pipeline.checkpoint.manifest import Manifest, mark_committed
from dlac_pipeline.checkpoint.restore.verified_copy import Restored, Verify, restore, verify_here
from dlac_pipeline.checkpoint.store import Tiers, tiers_of
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.branches import moves_back
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, new_nonce, quarantine
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, RunState
from dlac_pipeline.lakehouse.ledger.older_ledger import check_store, commit_marked
from dlac_pipeline.lakehouse.ledger.run_rows import Fence, checkpoint_rows, lineage_of, restorable_rows, way_out
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, LedgerRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import ReaderState, reader_state_of
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.choose_leg import LegChooser, ResumeOptions, leg_of, planned
from dlac_pipeline.supervise.memory.memory_choice import ClaimedState, FindStates, MemoryChoice, legs_of, states_here

Verifying = Callable[[int, int, int], None]
"""Callback for progress: the checkpoint's step, its verified bytes so far, and all its bytes."""
_Restore = Callable[[CheckpointRow], Restored]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Start of an attempt: after a verified checkpoint, or at step 0."""

    attempt: int
    nonce: str
    leg: str
    """The leg as JSON. It is committed already unless `leg_is_new`."""
    leg_is_new: bool
    replaces: int = 0
    leaves_out_more: bool = False
    """True if the leg is new and leaves out rows that the one before it did not."""
    branch: int = 1
    """Number of the run's branch: 1, and one more for each move of the head away from a branch."""
    went_back: list[int] = field(default_factory=list)
    """Attempts that moved the head so since the last commit of a checkpoint. A rewind is an attempt."""
    step: int = 0
    checkpoint_id: str | None = None
    head_step: int = 0
    """Step of the checkpoint. `step` is a later one with a memory state."""
    memory_of: int = 0
    """The attempt whose memory state is in `folder`, or 0. It has the cursors, too."""
    head_damage: str = ""
    """With a memory state: damage of the checkpoint's manifest, or empty. The next checkpoint quarantines its parent."""
    memory_at: float = 0.0
    """Time of that state in seconds since the epoch."""
    head_at: float = 0.0
    """With a memory state: time of the checkpoint, or of the run's beginning."""
    memory_sources: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """With a memory state of several nodes: address and port of each node that has parts of it, and their ranks."""
    folder: str | None = None
    """Folder of the checkpoint's verified files on `host`."""
    host: str = ""
    manifest_uri: str = ""
    manifest_digest: str = ""
    world_size: int = 0
    engine: str = ""
    reader_state: list[list[list[int]]] | None = None
    """Cursor of each source and key group: [pass, block, position, offset]."""
    quarantined: list[str] | None = None
    claim_s: float = 0.0
    verify_s: float = 0.0
    spike_step: int = 0
    """Step up to which loss spikes are trained through."""
    rehearses_until: int = 0
    """Last step of a rehearsal, which commits nothing. 0 for a launch that trains."""

    @property
    def cursors(self) -> ReaderState:
        """Cursor of each source and key group. Empty without a checkpoint."""
        return reader_state_of(self.reader_state or [])

    def to_json(self) -> str:
        """Return this resume point as JSON, for the ranks."""
        return json.dumps(asdict(self), default=str)

    def after(self, restored: Restored, row: CheckpointRow) -> "ResumePoint":
        """Return this point, placed after a checkpoint whose verified files are on this node."""
        manifest = restored.manifest
        return replace(
            self,
            step=manifest.step,
            head_step=manifest.step,
            checkpoint_id=manifest.checkpoint_id,
            folder=str(restored.folder),
            host=socket.gethostname(),
            manifest_uri=row.manifest_uri,
            manifest_digest=row.manifest_digest,
            world_size=manifest.world_size,
            engine=manifest.engine,
            reader_state=manifest.reader_state,
        )

    def in_memory(self, chosen: ClaimedState) -> "ResumePoint":
        """Return this point, placed after the memory state that a claim names. Ranks fail if it is lost by now."""
        claim, state, head = chosen.claim, chosen.state, chosen.head
        return replace(
            self,
            step=claim.memory_step,
            head_step=head.step,
            checkpoint_id=head.checkpoint_id or None,
            memory_of=claim.memory_of,
            memory_at=claim.memory_at,
            head_at=(head if head.checkpoint_id else chosen.rows[0]).committed_at.timestamp(),
            folder="" if state is None else str(state.folder),
            host=socket.gethostname(),
            manifest_uri=head.manifest_uri,
            manifest_digest=head.manifest_digest,
            world_size=claim.memory_ranks,
            engine="" if state is None else state.first.engine,
        )

    @classmethod
    def from_json(cls, text: str) -> "ResumePoint":
        """Return the resume point that `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRequest:
    """Request of one launch for the next attempt of a run."""

    nonce: str = field(default_factory=new_nonce)
    """Name of the launch. A repeated claim with it changes nothing."""
    replaces: int | None = None
    """Attempt that was seen to fail. Unset: `current`."""
    current: int | None = None
    """Current attempt before the first try of this claim. Unset: the current attempt now."""
    options: ResumeOptions = field(default_factory=ResumeOptions)
    launch_folder: str = ""
    launched_by: str = ""
    """Run of the orchestrator, so that a sensor knows which run's attempt is current."""
    purpose: Mapping[str, Any] = field(default_factory=dict)
    """Purpose of an attempt that does not train."""
    from_memory: bool = False
    """True if the attempt may resume from a memory state."""
    find_states: FindStates | None = None
    """Function that finds the memory states of the run. None: those of this node are found."""


def claim_and_verify(
    plans: Plans,
    spec: JobSpec,
    request: ClaimRequest,
    *,
    verifying: Verifying = lambda step, done, total: None,
    verify: Verify = verify_here,
    stop: threading.Event | None = None,
    on_claim: Callable[[], None] = lambda: None,
) -> ResumePoint:
    """Choose the leg, claim the run, verify the checkpoint to resume from, and return the resume point.

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
    """
    started = time.monotonic()
    ledger, tiers = Ledger(plans.lakehouse, stop=stop), tiers_of(spec)
    check_store(ledger, spec.run, tiers.durable_run(), tiers.files)
    chooser = LegChooser(ledger, plans, spec, request.options, recovering=request.replaces is not None)
    before = ledger.state(spec.run)
    find = request.find_states or partial(states_here, spec)
    leg = chooser.before_claim(before, lambda: legs_of(find()) if request.from_memory else ())
    current = request.current
    if current is None:  # an earlier try of this claim may be committed
        current = before.fence.attempt - (before.fence.nonce == request.nonce)
    replaced = current if request.replaces is None else request.replaces
    may_use = request.from_memory and not chooser.unsure
    memory = MemoryChoice(run=spec.run, ledger=ledger, replaced=replaced, find=find if may_use else None)
    detail = {**_detail_of(spec, request, tiers), **planned(leg)}
    choose = partial(memory.choose, leg=leg.to_json())
    claimed = claim(ledger, spec.run, nonce=request.nonce, replaces=replaced, detail=detail, choose=choose)
    claimed_at = time.monotonic()
    on_claim()

    def restore_row(row: CheckpointRow) -> Restored:
        return restore(row, tiers, partial(verifying, row.step), verify=verify)

    # An earlier try of this claim may have named a state, before the head looked damaged.
    chosen = memory.find_claimed(claimed.fence, leg=leg.to_json()) if request.from_memory else None
    if chosen is None:
        point = _resume(chooser, leg, before, claimed, tiers, restore_row)
    else:
        point = _begin(leg, claimed.fence, chosen.rows, chosen.head.checkpoint_id).in_memory(chosen)
        point = replace(point, head_damage=chooser.damage)
    verify_s = time.monotonic() - claimed_at
    point = replace(point, replaces=replaced, spike_step=request.options.spike_step)
    return replace(point, claim_s=claimed_at - started, verify_s=verify_s)


def _resume(
    chooser: LegChooser, leg: Leg, before: RunState, claimed: RunState, tiers: Tiers, restore_row: _Restore
) -> ResumePoint:
    """Find the newest whole checkpoint, quarantine newer damaged ones, and choose its leg. `leg` was known before the claim."""
    run, fence = claimed.run, claimed.fence
    rows = chooser.ledger.rows(run, kinds=HEAD_KINDS)
    if fence.head not in (before.fence.head, None):  # the replaced attempt committed a checkpoint in between
        chooser.check(leg_of(rows, fence.head or ""), rows)
    found, damaged = _newest_whole(rows, fence.head, restore_row)
    manifest = None if found is None else found.manifest
    if manifest is not None:
        _mark_head(manifest, checkpoint_rows(rows), tiers)
    if damaged:
        attempt = Attempt(run=run, number=fence.attempt, nonce=fence.nonce)
        rows = _quarantine(chooser.ledger, attempt, damaged, manifest)
    if chooser.unsure or (manifest.checkpoint_id if manifest else None) != before.fence.head:
        leg = chooser.at(rows, manifest)
    point = _begin(leg, fence, rows, "" if manifest is None else manifest.checkpoint_id)
    point = replace(point, quarantined=list(damaged))
    return point if found is None else point.after(found, checkpoint_rows(rows)[found.manifest.checkpoint_id])


def _begin(leg: Leg, fence: Fence, rows: list[LedgerRow], head: str) -> ResumePoint:
    """Return a resume point without a place. `head` is the checkpoint that it continues, or empty."""
    committed = leg_of(rows, head) if head else None
    moves, last = moves_back(rows), max((row.seq for row in checkpoint_rows(rows).values()), default=0)
    return ResumePoint(
        attempt=fence.attempt,
        nonce=fence.nonce,
        leg=leg.to_json(),
        leg_is_new=committed is None or leg.index != committed.index,
        leaves_out_more=leg.leaves_out_more_than(committed),
        branch=moves[-1].branch if moves else 1,
        went_back=[each.row.attempt for each in moves if each.row.seq > last],
    )


def _detail_of(spec: JobSpec, request: ClaimRequest, tiers: Tiers) -> dict[str, Any]:
    """Return a claim's record of this node, the places of checkpoints, and its launch."""
    return {
        "host": socket.gethostname(),
        "local": spec.checkpoint.local,
        "store": tiers.durable_run(),
        "marks_commits": True,
        "launch_folder": request.launch_folder,
        "rendezvous": spec.launch.rendezvous,
        "launched_by": request.launched_by,
        **request.purpose,
    }


def _quarantine(ledger: Ledger, attempt: Attempt, damaged: dict[str, str], head: Manifest | None) -> list[LedgerRow]:
    """Quarantine the damaged checkpoints that are newer than `head`, and return the rows of the run after that."""
    quarantine(ledger, attempt, damaged=damaged, head_after=None if head is None else head.checkpoint_id)
    rows = ledger.rows(attempt.run, kinds=HEAD_KINDS)
    if head is None:
        raise errors.NoRestorableCheckpoint(
            f"none of the checkpoints on the lineage of run {attempt.run!r} can be restored; damaged: {damaged!r}; "
            f"{way_out(attempt.run, rows)}"
        )
    return rows


def _mark_head(head: Manifest, known: Mapping[str, CheckpointRow], tiers: Tiers) -> None:
    """Renew the run's commit mark if the attempt that committed the head was killed before it wrote the mark."""
    files, folder = tiers.files.hurried(), tiers.durable_run()
    try:
        mark = commit_marked(folder, head.ledger_uuid, files)
    except errors.StoreUnavailable:  # the copy on this node is whole
        return
    newest = known.get("" if mark is None else mark.checkpoint_id)
    if newest is None or newest.seq < known[head.checkpoint_id].seq:
        mark_committed(head, folder, files)


def _newest_whole(
    rows: list[LedgerRow], head: str | None, restore_row: _Restore
) -> tuple[Restored | None, dict[str, str]]:
    """Return the newest whole checkpoint of the head's lineage, and the newer ones that are damaged (id -> reason)."""
    restorable = restorable_rows(rows)
    damaged: dict[str, str] = {}
    for name in lineage_of(rows, head):
        if name in restorable:
            try:
                return restore_row(restorable[name]), damaged
            except errors.CheckpointDamaged as err:
                damaged[name] = str(err)
    return None, damaged
