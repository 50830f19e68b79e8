"""Starter of a node's ranks: the processes of each attempt start in the background, while the supervisor claims the run.

A supervisor begins with this before it imports the catalog. So nothing here imports PyArrow, pyiceberg or PyTorch at once.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.rank_launcher import RankLauncher
from dlac_pipeline.elastic.ranks.processes import Processes, RankProcesses
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.healing import healing_of
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup


class RankStarter:
    """Starter of the ranks of one run."""

    def __init__(self) -> None:
        self.launcher = RankLauncher()

    def begin(self, spec: JobSpec) -> None:
        """Let the fork server import the libraries of ranks."""
        healing = healing_of(spec.launch)
        with suppress(OSError):  # an unavailable folder or script is reported at its first use
            if Path(spec.launch.script).is_file():
                fork_server.start_server(spec if healing is None else healing.prepare(spec))

    def start(self, spec: JobSpec, folder: Path, share: Share) -> RankGroup:
        """Start this node's ranks of an attempt. `folder` is the launch folder."""
        healing = healing_of(spec.launch)
        if healing is not None:
            return healing.start(RankStart(self, healing.prepare(spec), folder, share))
        start = RankStart(self, spec, folder, share)
        processes = start.in_background(partial(self.launcher.start_processes, spec, folder, share))
        return RankGroup(folder, processes, server_log=start.server_log)

    def close(self) -> None:
        """End the fork server. No rank starts after that."""
        fork_server.end_server()


class RankStart:
    """Start of this node's ranks in one attempt, and of those that replace dead ones."""

    def __init__(self, starter: RankStarter, spec: JobSpec, folder: Path, share: Share) -> None:
        self.spec, self.folder, self.share = spec, folder, share
        self.server_log = fork_server.log_of(spec) if fork_server.is_used(spec) else None
        """Output of the process that forks the ranks, if one does."""
        self._starter = starter

    def in_background(self, start: Callable[[], Processes]) -> RankProcesses:
        """Return the processes that `start` starts, by rank. A thread calls it, unless the ranks are unwanted by then."""
        launch, first, user = self.spec.launch, self.share.first_rank, object()
        fork_server.add_user(user)
        return RankProcesses(
            range(first, first + self.share.ranks),
            start,
            abort=partial(fork_server.end_server, only_user=user),
            why_unknown=partial(fork_server.why_gone, self.spec),
            on_gone=partial(fork_server.remove_user, user),
            patience_s=launch.start_timeout_s,
        )

    def start_ranks(
        self, share: Share, variables: Mapping[str, str] | None = None, *, first_local_rank: int = 0
    ) -> Processes:
        """Start the ranks of one process group, with further variables. Raises as `RankLauncher.start_processes`."""
        start = self._starter.launcher.start_processes
        return start(self.spec, self.folder, share, variables, first_local_rank=first_local_rank)
