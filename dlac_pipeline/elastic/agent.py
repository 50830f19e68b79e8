"""DLAC's elastic agent: torch's, which starts the ranks of a node, and no more. See docs/design/0011-nodes.md."""

import logging
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.numa.binding import AffinityMode, NumaOptions

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.handler import DlacRendezvous
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.ranks import rank
from dlac_pipeline.elastic.ranks.environment import environment_of_attempt, set_environment
from dlac_pipeline.elastic.ranks.processes import Processes, is_running
from dlac_pipeline.elastic.ranks.rank import held_signals, without_main_module
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_spec import LaunchSpec

_UNLIMITED = 2**31 - 1
"""Restarts that torch allows: how many there are is decided by their progress."""
_IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Variables that identify a rank. This process may have inherited some from another launcher."""
_SERVER_ENDS_S = 2.0
# It warns that signals are not handled on another thread than the main one: the supervisor handles them.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)


class RankAgent(LocalElasticAgent):
    """The agent of one node in one run, attempt after attempt."""

    def __init__(self, spec: JobSpec) -> None:
        launch = spec.launch
        joined = launch.model_copy(update={"nodes": ""})  # the supervisor has met the other nodes
        # torch replaces ${local_rank} and the like in arguments.
        arguments = tuple(each.replace("$", "$$") for each in (launch.script, *launch.args))
        workers = WorkerSpec(
            role="dlac",
            local_world_size=1,
            rdzv_handler=DlacRendezvous(spec.run, joined, batch_size=spec.order.batch_size),
            entrypoint=rank.main,
            args=arguments,
            max_restarts=_UNLIMITED if launch.max_restarts is None else launch.max_restarts,
            numa_options=_numa_options(launch),
            virtual_local_rank=launch.virtual_local_rank,
        )
        super().__init__(workers, logs_specs=_OwnLogs(), start_method=fork_server.START_METHODS[launch.start])
        self._environment: Mapping[str, str] = {}
        self._first_local_rank = 0
        self._has_started = False
        self._contexts: list[Any] = []
        """torch's contexts of the processes that run. The end of a context removes semaphores that its processes open late."""

    def start_processes(self, spec: JobSpec, folder: Path, share: Share, *, first_local_rank: int = 0) -> Processes:
        """Start this node's ranks, or some of them.

        Raise `TrainingFailed` if the fork server has ended, `OSError` if a process does not start.
        """
        self._note_share(share)
        self._environment = environment_of_attempt(spec, share, folder)
        self._first_local_rank = first_local_rank
        around = {} if fork_server.is_used(spec) else self._environment
        before = set(multiprocessing.active_children())
        try:
            with set_environment(around), held_signals(), without_main_module():
                self._start_workers(self._worker_group)
            gone = fork_server.why_gone(spec)
            if gone is not None:
                raise gone
        except Exception as err:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            raise (fork_server.why_gone(spec, within_s=_SERVER_ENDS_S) or err) from err
        started: Any = self._pcontext
        self._contexts = [each for each in self._contexts if any(map(is_running, each.pids().values()))]
        self._contexts.append(started)
        return {share.first_rank + local: process for local, process in enumerate(started._pc.processes)}

    def _note_share(self, share: Share) -> None:
        group: Any = self._worker_group  # torch declares its fields as None
        group.spec.local_world_size = share.ranks
        group.store = HashStore()  # torch requires a store, and does not use this one
        group.group_rank, group.group_world_size = share.node, share.nodes
        group.master_addr, group.master_port = share.address, share.port
        group.workers = [
            Worker(
                local_rank=local,
                global_rank=share.first_rank + local,
                role_rank=share.first_rank + local,
                world_size=share.world_size,
                role_world_size=share.world_size,
            )
            for local in range(share.ranks)
        ]
        self._remaining_restarts -= self._has_started
        self._has_started = True

    def _set_local_rank_env(self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        by_torch = dict(worker_env)
        worker_env.update(self._environment)
        fixed = ("CUDA_VISIBLE_DEVICES", *_IDENTITY) if spec.virtual_local_rank else _IDENTITY
        worker_env.update({name: value for name, value in by_torch.items() if name.startswith(fixed)})
        worker_env["LOCAL_RANK"] = str(self._first_local_rank + local_rank)


class _OwnLogs(LogsSpecs):
    """No log of torch's: each rank writes its log into the launch folder."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return no destinations."""
        nothing = dict.fromkeys(envs, "")
        for environment in envs.values():
            environment["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(nothing, nothing, {}, {}, dict.fromkeys(envs, os.devnull), "", "")

    @property
    def root_log_dir(self) -> str:
        """Return no folder."""
        return os.devnull


def _numa_options(launch: LaunchSpec) -> NumaOptions | None:
    if not launch.numa_binding:
        return None
    if not torch.cuda.is_available():
        raise SpecInvalid(
            f"expected accelerators for launch.numa_binding = {launch.numa_binding!r}, found none: leave it empty on this node"
        )
    return NumaOptions(affinity_mode=AffinityMode(launch.numa_binding))
