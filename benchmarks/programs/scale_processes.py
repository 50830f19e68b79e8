"""Measurements of benchmarks/scale_model.py with many processes: ranks that join, and votes.

Every process simulates a rank with its own processor. Its processor time counts, and not its wait for one of two cores. A
separate process with one thread serves the store of all of them.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import torch
import torch.distributed as dist

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.ranks.environment import GROUP_SETTINGS

_FORK = multiprocessing.get_context("fork")  # torch is imported once
_VOTES = 20
Work = Callable[[int, int, int, Barrier], list["Part"]]
"""Arguments of one process: its number, the number of processes, the store's port, and a barrier of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One operation that a process did with all others."""

    began: float
    ended: float
    cpu_s: float
    """Processor time of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """The same operation of all processes, from the first start to the last end."""

    wall_s: float
    cpu_s: float
    """Processor time of the busiest process."""
    server_cpu_s: float
    """Processor time of the store's process."""


def join_ranks(ranks: int, *, lazily: bool) -> dict[str, Together]:
    """Connect `ranks` ranks to the store, make a process group, then another one, then vote.

    `lazily` uses the supervisor's settings for process groups instead of PyTorch's own.
    """
    for name in GROUP_SETTINGS:
        os.environ.pop(name, None)
    if lazily:
        os.environ.update(GROUP_SETTINGS)
    return dict(zip(("connect", "first_group", "group", "vote"), _measure(ranks, _join, parts=4), strict=True))


def _join(number: int, count: int, port: int, barrier: Barrier) -> list[Part]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parts: list[Part] = []
    with _timed(barrier, parts):
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]  # not re-exported
    with _timed(barrier, parts):
        dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=timedelta(minutes=5))
    with _timed(barrier, parts):
        group = dist.new_group(backend="gloo")
    tree = RankTree(number, count, group)
    with _timed(barrier, parts):
        for _ in range(_VOTES):
            tree.broadcast(tree.lowest(b""))
    dist.destroy_process_group()
    return [*parts[:3], _per_vote(parts[3])]


def _per_vote(part: Part) -> Part:
    """Return the part of one vote."""
    return Part(began=part.began, ended=part.began + (part.ended - part.began) / _VOTES, cpu_s=part.cpu_s / _VOTES)


@contextmanager
def _timed(barrier: Barrier, parts: list[Part]) -> Iterator[None]:
    barrier.wait()
    began, cpu = time.monotonic(), time.process_time()
    yield
    parts.append(Part(began=began, ended=time.monotonic(), cpu_s=time.process_time() - cpu))
    barrier.wait()


def _measure(count: int, work: Work, *, parts: int) -> list[Together]:
    """Return the operations of all processes, one by one."""
    port = free_port()
    served, done = _FORK.Event(), _FORK.Event()
    server = _FORK.Process(target=_serve, args=(port, served, done), daemon=True)
    server.start()
    served.wait()
    barrier = _FORK.Barrier(count + 1)
    results: SimpleQueue[list[Part]] = _FORK.SimpleQueue()
    processes = [
        _FORK.Process(target=_send_parts, args=(results, work, number, count, port, barrier), daemon=True)
        for number in range(count)
    ]
    for process in processes:
        process.start()
    server_cpu_s = [_served_between(server.pid, barrier) for _ in range(parts)]
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    done.set()
    server.join()
    return [
        Together(
            wall_s=max(part.ended for part in each) - min(part.began for part in each),
            cpu_s=max(part.cpu_s for part in each),
            server_cpu_s=cpu_s,
        )
        for each, cpu_s in zip(zip(*found, strict=True), server_cpu_s, strict=True)
    ]


def _served_between(server: int | None, barrier: Barrier) -> float:
    """Return the processor time of the store's process between the next two barriers, in seconds."""
    barrier.wait()
    before = _processor_s(server)
    barrier.wait()
    return _processor_s(server) - before


def _processor_s(pid: int | None) -> float:
    """Return the processor time of all threads of a process, at a finer resolution than hundredths of seconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _send_parts(
    results: SimpleQueue[list[Part]], work: Work, number: int, count: int, port: int, barrier: Barrier
) -> None:
    results.put(work(number, count, port, barrier))


def _serve(port: int, served: Event, done: Event) -> None:
    _store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)  # type: ignore[attr-defined]  # not re-exported
    served.set()
    done.wait()
