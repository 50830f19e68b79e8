"""Number of the replica group that another launcher than `dlac train` has started, and what its process needs."""

import os

from dlac_pipeline.elastic.ranks.environment import defaults_of
from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE, this_process
from dlac_pipeline.extensions.replicas.lighthouse import check_torchft
from dlac_pipeline.extensions.replicas.rank import OWN_GROUP_VARIABLE
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec


def take_own_group(spec: JobSpec) -> None:
    """Take the number of this process's replica group from the environment. Raise `SpecInvalid` if it or the launch has none."""
    launch, number = spec.launch, os.environ.get(OWN_GROUP_VARIABLE, "")
    if not number.isdecimal() or int(number) >= launch.replicas:
        raise SpecInvalid(
            f"expected {OWN_GROUP_VARIABLE} of 0 to {launch.replicas - 1} for a replica group that `dlac train` does not start, "
            f"found {number or 'none'!r}: start each group with a torchrun of its own, and with its number"
        )
    ranks, ranks_here = this_process().world_size, this_process().ranks_here or 1
    if not ranks == ranks_here == launch.ranks_per_replica:
        raise SpecInvalid(
            f"expected launch.ranks_per_replica = {launch.ranks_per_replica} ranks of group {number} on this node, found "
            f"{ranks} ranks, {ranks_here} of them here: give torchrun --nproc-per-node {launch.ranks_per_replica}"
        )
    if spec.listeners.chosen():
        raise SpecInvalid(
            "expected no listeners with replica groups that `dlac train` does not start, found some: leave out [listeners]"
        )
    check_torchft()
    os.environ[GROUP_VARIABLE] = number
    for name, value in defaults_of(spec).items():
        os.environ.setdefault(name, value)
