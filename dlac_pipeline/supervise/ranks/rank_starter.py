"""Starter of a node's ranks: the processes of each attempt start in the background, while the supervisor claims the run.

A supervisor begins with this before it imports the catalog. So nothing here imports PyArrow, pyiceberg or PyTorch at once.
"""

import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.ranks.processes import Processes, RankProcesses
from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE
from dlac_pipeline.extensions.replicas.lighthouse import Lighthouse
from dlac_pipeline.extensions.replicas.rank import REJOINS_VARIABLE
from dlac_pipeline.extensions.replicas.replica_ranks import ReplicaRanks
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup

if TYPE_CHECKING:
    from dlac_pipeline.elastic.agent import RankAgent

_CLAIM_FIRST_S = 5.0
"""Seconds for which the import of PyTorch waits for the claim of the run. The catalog may be unavailable for longer."""


class RankStarter:
    """Starter of the ranks of one run, by torch's elastic agent."""

    def __init__(self) -> None:
        self._agent: RankAgent | None = None
        self._may_import = threading.Event()
        """Set unless the import of PyTorch waits for the claim of the run, which it would make slower by a second."""
        self._may_import.set()

    def begin(self, spec: JobSpec) -> None:
        """Let the fork server import the libraries of ranks. PyTorch is imported here once the run is claimed."""
        self._may_import.clear()
        with suppress(OSError):  # an unavailable folder or script is reported at its first use
            if Path(spec.launch.script).is_file():
                fork_server.start_server(spec)

    def start(self, spec: JobSpec, folder: Path, share: Share) -> RankGroup:
        """Start this node's ranks of an attempt. `folder` is the launch folder."""
        launch, user = spec.launch, object()
        fork_server.add_user(user)
        lighthouse = Lighthouse(spec, folder) if launch.replicas else None
        processes = RankProcesses(
            range(share.first_rank, share.first_rank + share.ranks),
            partial(self._start, spec, folder, share, lighthouse, user),
            abort=partial(self._abort, user),
            why_unknown=partial(fork_server.why_gone, spec),
            on_gone=partial(fork_server.remove_user, user),
            patience_s=max(launch.hang_timeout_s, launch.start_timeout_s),
        )
        server_log = fork_server.log_of(spec) if fork_server.is_used(spec) else None
        if lighthouse is not None:
            restart = partial(self._start_group, spec, folder, share, rejoins=True)
            return ReplicaRanks(folder, processes, launch, lighthouse, restart=restart, server_log=server_log)
        return RankGroup(folder, processes, log_mb=launch.log_mb, server_log=server_log)

    def import_agent(self) -> None:
        """Let this process import PyTorch now, because the run is claimed."""
        self._may_import.set()

    def close(self) -> None:
        """End the fork server. No rank starts after that."""
        fork_server.end_server()

    def _abort(self, user: object) -> None:
        self._may_import.set()
        fork_server.end_server(only_user=user)

    def _start(
        self,
        spec: JobSpec,
        folder: Path,
        share: Share,
        lighthouse: Lighthouse | None,
        user: object,
        processes: RankProcesses,
    ) -> Processes:
        try:
            return self._start_wanted(spec, folder, share, lighthouse, processes)
        finally:
            if not processes.is_wanted:
                fork_server.end_server(only_user=user)  # multiprocessing replaces one that was ended while it was asked

    def _start_wanted(
        self, spec: JobSpec, folder: Path, share: Share, lighthouse: Lighthouse | None, processes: RankProcesses
    ) -> Processes:
        if self._agent is None:
            if share.nodes == 1:  # several nodes have met through PyTorch's store
                self._may_import.wait(_CLAIM_FIRST_S)
            if not processes.is_wanted:
                return {}
            from dlac_pipeline.elastic.agent import RankAgent

            self._agent = RankAgent(spec)
        if not processes.is_wanted:
            return {}
        fork_server.start_server(spec)
        if lighthouse is not None:
            lighthouse.start()
        if not spec.launch.replicas:
            return self._agent.start_processes(spec, folder, share)
        started: dict[int, BaseProcess] = {}
        try:
            for group in range(spec.launch.replicas):
                started.update(self._start_group(spec, folder, share, group))
        except Exception:
            for process in started.values():
                process.kill()
            raise
        return started

    def _start_group(
        self, spec: JobSpec, folder: Path, share: Share, group: int, *, rejoins: bool = False
    ) -> Processes:
        """Start the ranks of a replica group, at first or again. To its ranks the group is all there is."""
        assert self._agent is not None, "it starts all ranks of an attempt"
        fork_server.start_server(spec)
        ranks = spec.launch.ranks_per_replica
        own = replace(share, world_size=ranks, ranks=ranks, first_rank=0, port=free_port())
        variables = {GROUP_VARIABLE: str(group), **({REJOINS_VARIABLE: "1"} if rejoins else {})}
        launch = spec.launch.model_copy(update={"env": {**spec.launch.env, **variables}})
        local = spec.model_copy(update={"launch": launch})
        first = group * ranks
        started = self._agent.start_processes(local, folder, own, first_local_rank=first)
        return {first + rank: process for rank, process in started.items()}
