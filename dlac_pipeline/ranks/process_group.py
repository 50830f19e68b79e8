"""Joining the process group, whoever has launched the ranks: DLAC's supervisor, torchrun or the `deepspeed` launcher.

All other groups, DLAC's and DeepSpeed's, are made through this one's store.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def join() -> None:
    """Initialize the default process group, unless the script did.

    torchrun keeps its store across its restarts, with the addresses of ranks that are dead: each restart gets keys of its
    own. On several machines each one counts restarts by itself, so that the numbers tell nothing: there torchrun is told not
    to keep the store (docs/launchers.md).
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restart is None or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend)
        return
    kept, rank, world_size = next(iter(rendezvous("env://")))
    store = PrefixStore(f"restart-{restart}", kept)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
