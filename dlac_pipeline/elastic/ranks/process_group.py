"""Process group of the ranks, under any launcher. All other groups, DLAC's and DeepSpeed's, are made through its store."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dlac_pipeline.elastic.ranks.addresses import GLOO_INTERFACE, LOOPBACK, interface_of, listen_at, own_address
from dlac_pipeline.elastic.ranks.this_process import this_process

_STORE_TIMEOUT = timedelta(seconds=300)
SERVED_STORES: list[TCPStore] = []
"""The stores that this process serves. PyTorch uses such a store while it is kept."""


def join() -> None:
    """Initialize the default process group, unless the script did.

    torchrun keeps its store across its restarts, with the addresses of dead ranks: each restart gets new keys. On several
    nodes each one counts restarts alone, so the numbers are useless. There torchrun must not keep the store (docs/launchers.md).
    """
    if dist.is_initialized():
        return
    # Gloo uses loopback if all ranks are on this node, as a supervisor records it in the environment.
    this = this_process()
    is_alone = this.ranks_here == this.world_size
    interface = interface_of(LOOPBACK)
    if is_alone and interface:
        os.environ.setdefault(GLOO_INTERFACE, interface)
    serve_group_store()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restart is None or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend)
        return
    kept, rank, world_size = next(iter(rendezvous("env://")))
    store = PrefixStore(f"restart-{restart}", kept)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def serve_store(address: str, port: int, *, timeout: timedelta = _STORE_TIMEOUT, shared: bool = False) -> TCPStore:
    """Serve a store at one address of this node. PyTorch alone listens at every address.

    `shared`: a later call in this process for the same port returns this store. Raises as `listen_at`.
    """
    listener = listen_at(address, port)
    number = int(listener.getsockname()[1])
    return TCPStore(
        address,
        number,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=shared,
        master_listen_fd=listener.detach(),
    )


def serve_group_store() -> None:
    """Serve the store of the process group at MASTER_ADDR alone, on rank 0, also for a script that initializes the group.

    Nothing is served where torchrun serves a store, and where MASTER_ADDR is another node. Raises as `listen_at`.
    """
    this = this_process()
    is_first = this.has_rank and this.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_first or dist.is_initialized() or SERVED_STORES or "MASTER_PORT" not in os.environ:
        return
    address = own_address(os.environ.get("MASTER_ADDR", ""))
    if address:
        SERVED_STORES.append(serve_store(address, int(os.environ["MASTER_PORT"]), shared=True))
