"""The environment of a job's ranks: allocator, threads, network interfaces, and variables of the job spec."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.ranks.addresses import GLOO_INTERFACE, LOOPBACK, interface_of
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE, RUN_VARIABLE
from dlac_pipeline.read.memory import ALLOCATOR_SETTINGS
from dlac_pipeline.spec.job_spec import JobSpec

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""Variable with the network interface of NCCL, which finds one automatically on several nodes."""
GROUP_SETTINGS = {"TORCH_GLOO_LAZY_INIT": "1"}
"""Ranks connect when they first talk to each other. Else each group of n ranks begins with n * n questions to one store."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""PyTorch requests huge pages for tensors of 2 MB or more in host memory. Else each step waits for the pages of its gradients."""
_LOCK = threading.RLock()


def defaults_of(spec: JobSpec) -> dict[str, str]:
    """Return the variables of all ranks of a job on this node, unless they are set."""
    # Ranks that all are on one node talk through loopback, where no other node reaches them.
    loopback = interface_of(LOOPBACK) if spec.launch.max_nodes == 1 else ""
    alone = {GLOO_INTERFACE: loopback, NCCL_INTERFACE: loopback} if loopback else {}
    return {**ALLOCATOR_SETTINGS, **GROUP_SETTINGS, **HUGE_PAGES, **alone, "OMP_NUM_THREADS": "1"}


def environment_of(spec: JobSpec) -> dict[str, str]:
    """Return the environment that all ranks of a job on this node share."""
    return {**defaults_of(spec), **os.environ, **spec.launch.env, RUN_VARIABLE: spec.run}


def environment_of_attempt(spec: JobSpec, share: Share, folder: Path) -> dict[str, str]:
    """Return the environment of this node's ranks in one attempt."""
    through = {GLOO_INTERFACE: share.interface} if share.interface else {}
    return {**environment_of(spec), **through, LAUNCH_VARIABLE: str(folder)}


@contextmanager
def set_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Give a process that is started inside this environment. multiprocessing has no other way. One thread at a time does."""
    with _LOCK:
        before = dict(os.environ)
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update(before)
