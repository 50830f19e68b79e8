"""Start of a node's ranks and their launch folder, for each attempt, in the background, while the supervisor claims the run.

In: a job spec, a launch folder, a share of the ranks. Out: the ranks, as their supervisor watches them.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dlac_pipeline.checkpoint.files import make_below
from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.ranks.processes import Processes, RankProcesses
from dlac_pipeline.elastic.ranks.rank_share import Share
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup

if TYPE_CHECKING:
    from dlac_pipeline.elastic.agent import RankAgent

KEEP_LAUNCHES = 50
"""Attempts of a run whose launch folders are kept, with logs and the job specs for rehearsals. Nodes may share a folder."""
_FORGET_AT_ONCE = 5


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
        """Let the fork server import the libraries of ranks, before it is known if any rank will start.

        PyTorch is imported here once the run is claimed (`import_agent`).
        """
        self._may_import.clear()
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
            abort=partial(self._abort, user),
            why_unknown=partial(fork_server.why_gone, spec),
            on_gone=partial(fork_server.remove_user, user),
            patience_s=max(launch.hang_timeout_s, launch.start_timeout_s),
        )
        return RankGroup(folder, processes, log_mb=launch.log_mb)

    def import_agent(self) -> None:
        """Let this process import PyTorch now, because the run is claimed."""
        self._may_import.set()

    def close(self) -> None:
        """End the fork server. No rank starts after that."""
        fork_server.end_server()

    def _abort(self, user: object) -> None:
        self._may_import.set()
        fork_server.end_server(only_user=user)

    def _start(self, spec: JobSpec, folder: Path, share: Share, processes: RankProcesses) -> Processes:
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
        return self._agent.start_processes(spec, folder, share)


def spec_for(spec: JobSpec, round_: Round) -> JobSpec:
    """Return the job spec with the number of ranks that the nodes of an attempt have."""
    launch = spec.launch.model_copy(update={"world_size": round_.share.world_size})
    return spec.model_copy(update={"launch": launch})


def start_local_ranks(spec: JobSpec, folder: Path, round_: Round, starter: RankStarter) -> RankGroup:
    """Start this node's ranks with a new launch folder.

    Raises:
        StoreUnavailable: the folder cannot be made, or the run's folder is gone with its mount.
    """
    with storing(folder):
        make_below(folder.parent, folder)
        path = folder / "spec.json"
        path.touch(mode=0o600)  # the spec may contain credentials
        path.write_text(spec.model_dump_json())
    forget_launches(folder.parent, keep=KEEP_LAUNCHES * round_.share.nodes)
    return starter.start(spec, folder, round_.share)


def write_resume_point(folder: Path, text: str) -> None:
    """Write the resume point as JSON to a launch folder, where the ranks wait for it."""
    with storing(folder):
        write_durably(folder / "resume.json", text.encode())


def forget_launches(folder: Path, *, keep: int) -> None:
    """Remove the oldest launch folders of a run beyond `keep`. Remove only a few per call, because a launch waits for it."""
    with suppress(FileNotFoundError):  # another node that shares the folder was faster
        oldest_last = sorted(folder.glob("launch-*/"), key=lambda each: each.stat().st_mtime, reverse=True)
        for each in oldest_last[keep:][-_FORGET_AT_ONCE:]:
            shutil.rmtree(each, ignore_errors=True)
