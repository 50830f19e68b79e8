"""Five ranks with threads that use one new process group a round: tagged trees and sums. Prints "exact" on success."""

import multiprocessing
import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.elastic.ranks.addresses import free_port

RANKS, ROUNDS = 5, 20


def talk(tree: RankTree, name: str) -> None:
    """Gather, decide and find the lowest failure, with each rank as the first in turn."""
    for turn in range(RANKS):
        votes = tree.gather(f"{name} {turn} {tree.rank}".encode())
        expected = [f"{name} {turn} {rank}".encode() for rank in range(RANKS)]
        assert votes == (expected if tree.rank == 0 else None), votes
        assert tree.broadcast(name.encode() if tree.rank == 0 else None) == name.encode()
        failed = {rank: f"{name} failed at {rank}".encode() for rank in range(turn, RANKS, 2)}
        lowest = tree.broadcast(tree.lowest(failed.get(tree.rank, b"")))
        assert lowest == failed[turn], lowest
        assert tree.broadcast(tree.lowest(b"")) == b""


def run(rank: int, port: int) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    for _ in range(ROUNDS):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        failures: list[BaseException] = []

        def in_thread(group: dist.ProcessGroup = group, failures: list[BaseException] = failures) -> None:
            try:
                talk(RankTree(rank, RANKS, group, tag=1), "thread")
            except BaseException as err:
                failures.append(err)

        thread = threading.Thread(target=in_thread)
        thread.start()
        sums = [torch.full((3,), float(number)) for number in range(2)]
        works = [dist.all_reduce(each, group=group, async_op=True) for each in sums]
        talk(RankTree(rank, RANKS, group), "main")
        for work in works:
            work.wait()
        thread.join()
        if failures:
            raise failures[0]
        assert [each.tolist() for each in sums] == [[0.0] * 3, [float(RANKS)] * 3]
        dist.destroy_process_group(group)
    dist.barrier()  # rank 0 serves the store
    dist.destroy_process_group()


def main() -> int:
    """Run all ranks, and return the exit status."""
    os.environ |= {"TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    port = free_port()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, port)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    codes = [each.exitcode for each in ranks]
    print("exact" if not any(codes) else codes)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
