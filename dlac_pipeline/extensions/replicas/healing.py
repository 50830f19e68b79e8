"""Start and healing of replica groups, for the door `dlac.healing`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE
from dlac_pipeline.extensions.replicas.lighthouse import Lighthouse
from dlac_pipeline.extensions.replicas.rank import REJOINS_VARIABLE, SETTINGS
from dlac_pipeline.extensions.replicas.replica_ranks import ReplicaRanks

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from dlac_pipeline.elastic.ranks.processes import Processes
    from dlac_pipeline.spec.job_spec import JobSpec
    from dlac_pipeline.supervise.ranks.rank_starter import RankStart

_PRELOAD = ("torchft", "dlac_pipeline.extensions.replicas.run")
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
        """Begin the start of all groups, after their lighthouse. Raise `SpecInvalid` without torchft."""
        lighthouse = Lighthouse(start.spec, start.folder)
        return ReplicaRanks(
            start.folder,
            start.in_background(partial(_start_groups, start, lighthouse)),
            start.spec.launch,
            lighthouse,
            restart=partial(_start_group, start, rejoins=True),
            server_log=start.server_log,
        )

    def run_type(self) -> type[Any]:
        """Return the training run of a replica group."""
        from dlac_pipeline.extensions.replicas.run import ReplicaRun  # imports PyTorch

        return ReplicaRun


def _start_groups(start: RankStart, lighthouse: Lighthouse) -> Processes:
    lighthouse.start()
    started: dict[int, BaseProcess] = {}
    try:
        for group in range(start.spec.launch.replicas):
            started.update(_start_group(start, group))
    except Exception:
        for process in started.values():
            process.kill()
        raise
    return started


def _start_group(start: RankStart, group: int, *, rejoins: bool = False) -> Processes:
    """Start the ranks of a replica group, at first or again. To its ranks the group is all there is."""
    ranks = start.spec.launch.ranks_per_replica
    own = replace(start.share, world_size=ranks, ranks=ranks, first_rank=0, port=free_port())
    variables = {GROUP_VARIABLE: str(group), **({REJOINS_VARIABLE: "1"} if rejoins else {})}
    first = group * ranks
    started = start.start_ranks(own, variables, first_local_rank=first)
    return {first + rank: process for rank, process in started.items()}
