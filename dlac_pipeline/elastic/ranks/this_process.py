"""This process among those of its job, by the variables of its launcher: a supervisor, torchrun, or the `deepspeed` launcher.

The rest of the core reads these variables here: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. A process has a rank, and a
share of the batch. Processes of one replica of the model have the same share.
"""

import os
from dataclasses import dataclass

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.spec.mesh_spec import DATA_PARALLEL, MeshSpec

GROUP_VARIABLE = "DLAC_PROCESS_GROUP"
"""Variable with the number of this process's group, if an attempt has several process groups, which are equally large."""

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Variable of torchrun: how many times it has started the ranks again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThisProcess:
    """A process of a job. Its process group has all ranks of the attempt, unless the attempt has several groups."""

    rank: int = 0
    """Number in the process group."""
    world_size: int = 1
    """Number of processes in the process group."""
    mesh: MeshSpec = DATA_PARALLEL
    has_rank: bool = False
    """True if a launcher has numbered the process."""
    group: int | None = None
    """Number of the process group. None: the attempt has no other one."""
    local_rank: int | None = None
    """Number among the processes of the group on this node. None: no launcher has counted them."""
    ranks_here: int | None = None
    """Number of these processes. None: no launcher has counted them."""

    @property
    def coordinate(self) -> DataCoordinate:
        """Share of the batch that this process reads, among the shares of its process group."""
        index = self.mesh.coordinates(self.rank, self.world_size)["dp"]
        return DataCoordinate(index, self.mesh.readers(self.world_size))

    @property
    def speaks(self) -> bool:
        """True for the first process of a coordinate. It alone reports what the coordinate reads."""
        return self.mesh.speaks(self.rank, self.world_size)

    def ranks_with_values(self, *, of_all_stages: bool) -> list[int]:
        """Return the ranks that take the values of this one's share: those on this node, as far as the launcher names them.

        Stages in the middle take none, unless those `of_all_stages` do.
        """
        first = self.rank - (self.local_rank or 0)
        counted = self.ranks_here is not None and self.local_rank is not None
        here = range(first, first + self.ranks_here) if counted and self.ranks_here else [self.rank]
        return [
            rank
            for rank in here
            if self.mesh.coordinates(rank, self.world_size)["dp"] == self.coordinate.index
            and (of_all_stages or not self.mesh.is_middle_stage(rank, self.world_size))
        ]

    @property
    def rank_of_all(self) -> int:
        """Number among all ranks of the attempt."""
        return (self.group or 0) * self.world_size + self.rank


def this_process(mesh: MeshSpec = DATA_PARALLEL) -> ThisProcess:
    """Read the environment. Raise `SpecInvalid` if a variable is no number, or the processes do not form the mesh."""
    rank, world_size = _numbers(RANK="0", WORLD_SIZE="1")
    local_rank, ranks_here = _numbers(LOCAL_RANK="", LOCAL_WORLD_SIZE="")
    (group,) = _numbers(**{GROUP_VARIABLE: ""})
    if not mesh.divides(world_size or 1):
        raise SpecInvalid(
            f"expected a number of processes that is a multiple of the {mesh.replica_ranks} ranks of a replica in launch.mesh, "
            f"found {world_size}: start others, or correct it"
        )
    if local_rank is not None and ranks_here:
        local_rank %= ranks_here  # a supervisor counts through the groups of a node, because each rank has a device
    return ThisProcess(
        rank=rank or 0,
        world_size=world_size or 1,
        mesh=mesh,
        has_rank="RANK" in os.environ,
        group=group,
        local_rank=local_rank,
        ranks_here=ranks_here,
    )


def was_restarted() -> bool:
    """Return True if torchrun has started this rank again after a failure. Otherwise an operator has started it."""
    return os.environ.get(_RESTARTS, "0") != "0"


def stated_world_size() -> str:
    """Return the world size as the environment states it."""
    return os.environ.get("WORLD_SIZE", "1")


def _numbers(**defaults: str) -> list[int | None]:
    """Return the numbers in variables. None: neither the environment nor `defaults` has one."""
    found = {name: os.environ.get(name, default) for name, default in defaults.items()}
    try:
        return [int(value) if value or name in os.environ else None for name, value in found.items()]
    except ValueError as err:
        names, values = " and ".join(found), " and ".join(map(repr, found.values()))
        raise SpecInvalid(f"expected numbers in {names}, found {values}: correct or unset them") from err
