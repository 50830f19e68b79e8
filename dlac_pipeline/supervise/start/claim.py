"""Claim of a run: one append to the ledger, which names the launch. From then on older attempts commit nothing."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dlac_pipeline.checkpoint.memory.states import MemoryState
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, new_nonce
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import Fence
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.memory.memory_choice import ClaimedState, FindStates, MemoryChoice, states_here
from dlac_pipeline.supervise.start.resolve import Resolved, ResumeOptions, planned


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
    """Function that finds the memory states of the run. None: this node's states are found."""

    def states_of(self, spec: JobSpec) -> Sequence[MemoryState]:
        """Return the memory states from which the attempt may resume, the newest first."""
        if not self.from_memory:
            return []
        return states_here(spec) if self.find_states is None else self.find_states()


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """A claimed attempt."""

    attempt: Attempt
    replaces: int
    """The attempt that was the current one."""
    head: str | None
    """Head of the run under this claim. No other attempt moves it."""
    memory: ClaimedState | None
    """The state in memory that the claim names, or None."""


def claim_attempt(
    ledger: Ledger, spec: JobSpec, request: ClaimRequest, resolved: Resolved, before: Fence, tiers: Tiers
) -> Claimed:
    """Claim the run for a resolved leg. `before` is the fence for which it was resolved. Raises as `claim`."""
    current = attempt_before(before, request.nonce) if request.current is None else request.current
    replaced = current if request.replaces is None else request.replaces
    leg, may_use = resolved.leg.to_json(), request.from_memory and resolved.is_sure
    find = partial(request.states_of, spec)
    memory = MemoryChoice(run=spec.run, ledger=ledger, replaced=replaced, find=find if may_use else None)
    detail = {**_detail_of(spec, request, tiers), **planned(resolved.leg)}
    choose = partial(memory.choose, leg=leg)
    fence = claim(ledger, spec.run, nonce=request.nonce, replaces=replaced, detail=detail, choose=choose).fence
    return Claimed(
        attempt=Attempt(run=spec.run, number=fence.attempt, nonce=fence.nonce),
        replaces=replaced,
        head=fence.head,
        # An earlier try of this claim may have named a state, before the head looked damaged.
        memory=memory.find_claimed(fence, leg=leg) if request.from_memory else None,
    )


def attempt_before(fence: Fence, nonce: str) -> int:
    """Return the current attempt before the launch `nonce` claimed: an earlier try of its claim may be committed."""
    return fence.attempt - 1 if fence.nonce == nonce else fence.attempt


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
