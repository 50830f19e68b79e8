"""Ways of healing: how the ranks of a run are started, and what the death of one costs. Extensions bring them.

Without one all ranks start together, and a dead rank ends the attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dlac_pipeline.lakehouse.doors import Door

if TYPE_CHECKING:
    from dlac_pipeline.elastic.round import Round
    from dlac_pipeline.spec.job_spec import JobSpec
    from dlac_pipeline.spec.launch_spec import LaunchSpec
    from dlac_pipeline.supervise.ranks.all_ranks import AllRanks
    from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
    from dlac_pipeline.supervise.ranks.rank_starter import RankStart

HEALING = Door(group="dlac.healing", noun="way of healing")


class Healing(Protocol):
    """A way of healing, made without arguments. Its module imports neither PyTorch nor the catalog: a supervisor begins with it.

    The ranks of a group that it starts form one process group, and have `GROUP_VARIABLE` if there are several.
    """

    def prepare(self, spec: JobSpec) -> JobSpec:
        """Return the job spec for the processes of this node, with the variables of ranks and the modules to preload."""

    def start(self, start: RankStart) -> RankGroup:
        """Begin the start of this node's ranks in one attempt. The supervisor asks the returned ranks to `heal`.

        Raise `SpecInvalid` if a package that the ranks need is missing.
        """

    def all_ranks(self, own: Any, round_: Round) -> AllRanks:
        """Return the ranks of several nodes as the leader sees them, of which `start` has returned its `own`."""

    def run_type(self) -> type[Any]:
        """Return the subclass of `TrainingRun` by which a rank joins the others, at first or again. Only ranks call it."""


def healing_of(launch: LaunchSpec) -> Healing | None:
    """Return the way of healing that a job spec chooses. None: a dead rank ends the attempt. Raises `BadInput` as `Door.load`."""
    if not launch.healing:
        return None
    found: Healing = HEALING.load(launch.healing, setting="launch.replicas")()
    return found
