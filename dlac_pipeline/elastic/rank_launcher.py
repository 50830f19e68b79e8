"""Launcher of the processes of a node's ranks, by multiprocessing alone. See docs/design/0011-nodes.md.

A supervisor imports this module before the catalog, so nothing here imports PyTorch at once.
"""

import multiprocessing
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.ranks import rank
from dlac_pipeline.elastic.ranks.environment import environment_of_attempt, set_environment
from dlac_pipeline.elastic.ranks.processes import Processes
from dlac_pipeline.elastic.ranks.rank import held_signals, without_main_module
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_spec import LaunchSpec

_UNLIMITED = 2**31 - 1
"""Restarts as ranks see them: how many there are is decided by their progress."""
_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Variables that torchrun sets for each rank, unless they are set."""
_DEVICES = "CUDA_VISIBLE_DEVICES"
_SERVER_ENDS_S = 2.0


class RankLauncher:
    """Launcher of the ranks of one node in one run, attempt after attempt."""

    def __init__(self) -> None:
        self._starts = 0

    def start_processes(
        self,
        spec: JobSpec,
        folder: Path,
        share: Share,
        variables: Mapping[str, str] | None = None,
        *,
        first_local_rank: int = 0,
    ) -> Processes:
        """Start this node's ranks, or some of them with further variables.

        Raise `TrainingFailed` if the fork server has ended, `OSError` if a process does not start.
        """
        fork_server.start_server(spec)  # which all groups of ranks share, whatever their variables
        launch = spec.launch.model_copy(update={"env": {**spec.launch.env, **(variables or {})}})
        spec, is_forked = spec.model_copy(update={"launch": launch}), fork_server.is_used(spec)
        _check_binding(launch)
        of_attempt = {**_DEFAULTS, **environment_of_attempt(spec, share, folder)}
        context: Any = multiprocessing.get_context(fork_server.START_METHODS[launch.start])
        restarts, self._starts = self._starts, self._starts + 1
        started: dict[int, BaseProcess] = {}
        try:
            with set_environment({} if is_forked else of_attempt), held_signals(), without_main_module():
                for local in range(share.ranks):
                    own = _identity_of(spec, share, local, restarts=restarts)
                    own |= {"LOCAL_RANK": str(first_local_rank + local), **_devices_of(launch, of_attempt, local)}
                    arguments = ({**of_attempt, **own}, launch.numa_binding, local, launch.script, *launch.args)
                    process: BaseProcess = context.Process(target=rank.main, args=arguments)
                    process.start()
                    started[share.first_rank + local] = process
            gone = fork_server.why_gone(spec)
            if gone is not None:
                raise gone
        except Exception as err:
            for process in started.values():
                process.kill()
            raise (fork_server.why_gone(spec, within_s=_SERVER_ENDS_S) or err) from err
        return started


def _identity_of(spec: JobSpec, share: Share, local: int, *, restarts: int) -> dict[str, str]:
    """Return the variables of a rank by which PyTorch and the libraries of other launchers know it, as torchrun sets them."""
    most = spec.launch.max_restarts
    numbers = {
        "RANK": share.first_rank + local,
        "ROLE_RANK": share.first_rank + local,
        "WORLD_SIZE": share.world_size,
        "ROLE_WORLD_SIZE": share.world_size,
        "LOCAL_WORLD_SIZE": share.ranks,
        "GROUP_RANK": share.node,
        "GROUP_WORLD_SIZE": share.nodes,
        "MASTER_PORT": share.port,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": _UNLIMITED if most is None else most,
    }
    return {
        **{name: str(number) for name, number in numbers.items()},
        "ROLE_NAME": "dlac",
        "MASTER_ADDR": share.address,
        "TORCHELASTIC_RUN_ID": spec.run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "",
    }


def _devices_of(launch: LaunchSpec, environment: Mapping[str, str], local: int) -> Mapping[str, str]:
    """Return the variable by which a rank sees its own accelerator alone. Empty: it sees all. Raise `SpecInvalid` without one."""
    if not launch.virtual_local_rank:
        return {}
    visible = environment.get(_DEVICES)
    if visible is None:
        return {_DEVICES: str(local)}
    devices = visible.split(",")
    if local >= len(devices):
        raise SpecInvalid(
            f"expected an accelerator for each rank of this node, found {_DEVICES}={visible!r} for rank {local} of it: show more "
            "of them, or lower launch.nproc_per_node"
        )
    return {_DEVICES: devices[local].strip()}


def _check_binding(launch: LaunchSpec) -> None:
    """Raise `SpecInvalid` if ranks are to be bound to the processors of accelerators, and this node has none."""
    if not launch.numa_binding:
        return
    import torch

    if not torch.cuda.is_available():
        raise SpecInvalid(
            f"expected accelerators for launch.numa_binding = {launch.numa_binding!r}, found none: leave it empty on this node"
        )
