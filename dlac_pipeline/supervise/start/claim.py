"""Claim of a run: one append to the ledger, which names the launch. From then on older attempts commit nothing."""

import socket
from dataclasses import dataclass
from functools import partial
from typing import Any

from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import Fence
from dlac_pipeline.memory_states.choose import ClaimedState, MemoryChoice
from dlac_pipeline.plan.legs.committed_leg import planned
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import may_have_died_loading
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.resolve import Resolved


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
    memory = MemoryChoice(
        run=spec.run,
        ledger=ledger,
        replaced=replaced,
        find=find if may_use else list,
        died_loading=may_have_died_loading,
    )
    facts = {**_facts_of(spec, request, tiers), **planned(resolved.leg)}
    choose = partial(memory.choose, leg=leg)
    fence = claim(ledger, spec.run, nonce=request.nonce, replaces=replaced, facts=facts, choose=choose).fence
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


def _facts_of(spec: JobSpec, request: ClaimRequest, tiers: Tiers) -> dict[str, Any]:
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
