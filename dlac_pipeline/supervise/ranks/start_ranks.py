"""Start of a node's ranks, for each attempt, in the background, while the supervisor claims the run.

In: a job spec, a launch folder, a share of the ranks. Out: the ranks, as their supervisor watches them.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.ranks.processes import Processes, RankProcesses
from dlac_pipeline.elastic.ranks.rank_share import Share
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup

if TYPE_CHECKING:
    from dlac_pipeline.elastic.agent import RankAgent


class RankStarter:
    """Starter of the ranks of one run, by torch's elastic agent."""

    def __init__(self) -> None:
        self._agent: RankAgent | None = None

    def begin(self, spec: JobSpec) -> None:
        """Let the fork server import the libraries of ranks, before it is known if any rank will start."""
        with suppress(OSError):  # an unavailable folder or script is reported at its first use
            if Path(spec.launch.script).is_file():
                fork_server.start_server(spec)

    def start(self, spec: JobSpec, folder: Path, share: Share) -> RankGroup:
        """Start this node's ranks of an attempt. `folder` is the launch folder."""
        launch, user = spec.launch, object()
        fork_server.add_user(user)
        processes = RankProcesses(
            range(share.first_rank, share.first_rank + share.ranks),
            partial(self._start, spec, folder, share),
            abort=partial(fork_server.end_server, only_user=user),
            why_unknown=partial(fork_server.why_gone, spec),
            on_gone=partial(fork_server.remove_user, user),
            patience_s=max(launch.hang_timeout_s, launch.start_timeout_s),
        )
        return RankGroup(folder, processes, log_mb=launch.log_mb)

    def close(self) -> None:
        """End the fork server. No rank starts after that."""
        fork_server.end_server()

    def _start(self, spec: JobSpec, folder: Path, share: Share, processes: RankProcesses) -> Processes:
        if self._agent is None:
            from dlac_pipeline.elastic.agent import RankAgent  # imports PyTorch while the run is claimed

            self._agent = RankAgent(spec)
        if not processes.is_wanted:
            return {}
        fork_server.start_server(spec)
        return self._agent.start_processes(spec, folder, share)
