"""Request of a launch for the next attempt of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlac_pipeline.lakehouse.ledger.commits import new_nonce
from dlac_pipeline.lakehouse.ledger.plans import PlanRow
from dlac_pipeline.memory_states.choose import states_here
from dlac_pipeline.memory_states.states import FindStates, MemoryState
from dlac_pipeline.plan.legs.leg import Unreadable
from dlac_pipeline.spec.job_spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    """Requests of a launch beyond resuming, by default none: the plans of a new run, and the changes of a new leg."""

    plans: tuple[PlanRow, ...] = ()
    """Plan of each source, for a new run. If empty, the sources of the spec are planned before the claim."""
    repin: bool = False
    """True to continue with the changes of followed tables since they were planned."""
    unreadable: tuple[Unreadable, ...] = ()
    """Row groups to leave out from this launch on."""
    spike_step: int = 0
    """Step up to which loss spikes are trained through, because rows were left out for them."""
    copies_at_once: bool = False
    """True to copy no state beside training."""


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
