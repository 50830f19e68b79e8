"""Start and healing of replica groups, for the door `dlac.healing`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dlac_pipeline.elastic.ranks.addresses import LOOPBACK, free_port
from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE
from dlac_pipeline.extensions.replicas.lighthouse import Lighthouse
from dlac_pipeline.extensions.replicas.rank import (
    ADDRESS_VARIABLE,
    REJOINS_VARIABLE,
    SETTINGS,
    check_torchft,
    groups_of,
    mark_dead,
)
from dlac_pipeline.extensions.replicas.replica_ranks import ReplicaRanks

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from dlac_pipeline.elastic.ranks.processes import Processes
    from dlac_pipeline.elastic.round import Round
    from dlac_pipeline.spec.job_spec import JobSpec
    from dlac_pipeline.supervise.ranks.all_ranks import AllRanks
    from dlac_pipeline.supervise.ranks.rank_starter import RankStart

_PRELOAD = ("torchft", "dlac_pipeline.extensions.replicas.run", "dlac_pipeline.extensions.sharded.torchft_state")
"""Modules that the ranks of replica groups import."""


class ReplicaHealing:
    """Replica groups: a dead group is started again within its attempt, and gets the state of another one."""

    def prepare(self, spec: JobSpec) -> JobSpec:
        """Return the job spec with the variables and modules of the ranks of groups."""
        launch = spec.launch
        unset = {name: value for name, value in SETTINGS.items() if name not in os.environ}
        changes = {"env": {**unset, **launch.env}, "preload": [*launch.preload, *_PRELOAD]}
        return spec.model_copy(update={"launch": launch.model_copy(update=changes)})

    def start(self, start: RankStart) -> ReplicaRanks:
        """Begin the start of this node's groups, at the leader after their lighthouse. Raise `SpecInvalid` without torchft."""
        check_torchft()
        share, kind, lighthouse = start.share, ReplicaRanks, None
        if share.node:
            from dlac_pipeline.extensions.replicas.all_groups import FollowedGroups  # imports the catalog

            kind = FollowedGroups
        else:
            lighthouse = Lighthouse(start.spec, start.folder, share.own_address)
        groups = groups_of(share.first_rank, share.ranks, start.spec.launch.ranks_per_replica)
        newcomers = groups if share.is_late else ()
        for group in newcomers:
            mark_dead(start.folder, group)
        return kind(
            start.folder,
            start.in_background(partial(_start_groups, start, lighthouse, groups)),
            start.spec.launch,
            lighthouse,
            restart=partial(_start_group, start, rejoins=True),
            newcomers=newcomers,
            server_log=start.server_log,
        )

    def all_ranks(self, own: ReplicaRanks, round_: Round) -> AllRanks:
        """Return the groups of all nodes, as the leader sees them."""
        from dlac_pipeline.extensions.replicas.all_groups import AllGroups  # imports the catalog

        return AllGroups(own, round_)

    def run_type(self) -> type[Any]:
        """Return the training run of a replica group."""
        from dlac_pipeline.extensions.replicas.run import ReplicaRun  # imports PyTorch

        return ReplicaRun


def _start_groups(start: RankStart, lighthouse: Lighthouse | None, groups: range) -> Processes:
    if lighthouse is not None:
        lighthouse.start()
    started: dict[int, BaseProcess] = {}
    try:
        for group in groups:
            started.update(_start_group(start, group, rejoins=start.share.is_late))
    except Exception:
        for process in started.values():
            process.kill()
        raise
    return started


def _start_group(start: RankStart, group: int, *, rejoins: bool = False) -> Processes:
    """Start the ranks of a replica group, at first or again. To its ranks the group is all there is."""
    share, ranks = start.share, start.spec.launch.ranks_per_replica
    own = replace(
        share, world_size=ranks, ranks=ranks, first_rank=0, address=LOOPBACK, port=free_port(), node=0, nodes=1
    )
    variables = {GROUP_VARIABLE: str(group), **({REJOINS_VARIABLE: "1"} if rejoins else {})}
    if share.nodes > 1:
        variables[ADDRESS_VARIABLE] = share.own_address
    first = group * ranks
    started = start.start_ranks(own, variables, first_local_rank=first - share.first_rank)
    return {first + rank: process for rank, process in started.items()}
