"""Votes up and the decision down the tree of ranks, with 2 to 64 processes: `python -m benchmarks.coordination [--quick]`.

Every rank sends a vote of 2 KB and waits for the root's decision, over the product's own tree and torch.distributed (gloo)
between real processes, forked from one that has imported torch. Depth and messages are counted: every message carries the
length of the chain of messages before it. On two cores the wall time grows with the processes, not with the tree. So every
message takes 20 ms, half before it is sent and half after it is received, as on a network with busy nodes.
A flat gather and broadcast alternates with it: the root receives from all and sends to all. A round lasts from the last rank's
vote until the last rank has the decision. 4,096 ranks are extrapolated, not measured. `--quick` stops at 16.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import log2
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.figures import Figure, report
from dlac_pipeline.checkpoint.collectives import RankTree

_HOP_S, _ROUNDS, _VOTE = 0.020, 12, b"v" * 2048
_SHAPES = ("tree", "flat", "tree_again", "tree_plain")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """One rank's part in one round."""

    shape: str
    began: float
    ended: float
    depth: int
    """Length of the chain of messages that brought this rank its votes."""
    messages: int


class _Counted(RankTree):
    """The product's tree, with counted and delayed messages."""

    hop_s = 0.0
    chain = messages = 0

    def _send(self, payload: bytes, to: int) -> None:
        time.sleep(self.hop_s / 2)
        self.messages += 1
        super()._send((self.chain + 1).to_bytes(4, "big") + payload, to)

    def _receive(self, source: int) -> bytes:
        message = super()._receive(source)
        time.sleep(self.hop_s / 2)
        self.messages += 1
        self.chain = max(self.chain, int.from_bytes(message[:4], "big"))
        return message[4:]


class _Flat(_Counted):
    """The flat alternative: every rank is the root's child."""

    @property
    def parent(self) -> int:
        """Return the root."""
        return 0

    @property
    def children(self) -> list[int]:
        """Return all other ranks for the root."""
        return list(range(1, self.world_size)) if self.rank == 0 else []


def main() -> None:
    """Measure every number of ranks, and report."""
    worlds = (2, 4, 8, 16) if "--quick" in sys.argv[1:] else (2, 4, 8, 16, 32, 64)
    figures: dict[str, Figure] = {}
    times: dict[str, dict[int, float]] = {shape: {} for shape in _SHAPES}
    for world in worlds:
        rounds = _measure(world)
        for shape in _SHAPES:
            times[shape][world] = _seconds([each for each in rounds if each.shape == shape])
        tree = [each for each in rounds if each.shape == "tree"]
        flat = [each for each in rounds if each.shape == "flat"]
        depth = int(log2(world))
        figures |= {
            f"depth_{world}": Figure(value=max(each.depth for each in tree), unit="messages", bar=f"<= {depth}"),
            f"messages_of_busiest_rank_{world}": Figure(
                value=max(each.messages for each in tree), unit="messages", bar=f"<= {2 * depth}"
            ),
            f"flat_messages_of_busiest_rank_{world}": Figure(
                value=max(each.messages for each in flat), unit="messages"
            ),
            **{f"{shape}_{world}": Figure(value=1e3 * times[shape][world], unit="ms") for shape in _SHAPES},
        }
        print(json.dumps({"ranks": world, "loadavg": os.getloadavg()}), flush=True)
    report("coordination", figures | _growth(times, worlds[-1]))


def _growth(times: dict[str, dict[int, float]], last: int) -> dict[str, Figure]:
    """Return the growth of the time from 2 ranks, and linear extrapolations in log2 of the ranks and in the ranks."""
    tree, flat = times["tree"], times["flat"]
    per_level = (tree[last] - tree[2]) / (log2(last) - 1)
    per_rank = (flat[last] - flat[2]) / (last - 2)
    return {
        f"tree_{last}_over_2": Figure(value=tree[last] / tree[2], unit="ratio", bar=f"<= {1.5 * log2(last)}"),
        f"tree_{last}_over_2_if_logarithmic": Figure(value=log2(last), unit="ratio"),
        f"tree_again_{last}_over_tree": Figure(value=times["tree_again"][last] / tree[last], unit="ratio"),
        f"flat_{last}_over_2": Figure(value=flat[last] / flat[2], unit="ratio"),
        f"flat_over_tree_{last}": Figure(value=flat[last] / tree[last], unit="ratio"),
        "tree_4096_extrapolated": Figure(value=1e3 * (tree[2] + per_level * 11), unit="ms, extrapolated"),
        "flat_4096_extrapolated": Figure(value=1e3 * (flat[2] + per_rank * 4094), unit="ms, extrapolated"),
        "injected_per_message": Figure(value=1e3 * _HOP_S, unit="ms"),
        "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
    }


def _seconds(rounds: list[_Round]) -> float:
    """Return the median over the rounds from the last vote to the last rank that has the decision."""
    numbered: dict[int, list[_Round]] = {}
    ranks = len(rounds) // _ROUNDS
    for at, each in enumerate(rounds):
        numbered.setdefault(at % _ROUNDS, []).append(each)
    assert all(len(each) == ranks for each in numbered.values())
    return median(max(one.ended for one in each) - max(one.began for one in each) for each in numbered.values())


def _measure(world: int) -> list[_Round]:
    """Return the rounds of all ranks, rank by rank."""
    context = multiprocessing.get_context("fork")  # torch is imported once, and no process group exists yet
    with tempfile.TemporaryDirectory() as folder:
        results: SimpleQueue[tuple[int, list[dict[str, Any]]]] = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(rank, world, folder, results), daemon=True) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        found = dict(results.get() for _ in ranks)
        for process in ranks:
            process.join()
    return [_Round(**each) for rank in range(world) for each in found[rank]]


def _rank(rank: int, world: int, folder: str, results: SimpleQueue[tuple[int, list[dict[str, Any]]]]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    done = [_round(shape, number, rank, world) for number in range(_ROUNDS) for shape in _SHAPES]
    results.put((rank, [asdict(each) for each in done]))
    dist.destroy_process_group()


def _round(shape: str, number: int, rank: int, world: int) -> _Round:
    """Vote, and receive the decision."""
    tree = (_Flat if shape == "flat" else _Counted)(rank, world, None)
    tree.hop_s = 0.0 if shape == "tree_plain" else _HOP_S
    dist.barrier()
    began = time.monotonic()
    votes = tree.gather(_VOTE)
    depth = tree.chain
    decision = None if votes is None else b"%d votes in round %d" % (len(votes), number)
    assert tree.broadcast(decision) == b"%d votes in round %d" % (world, number)
    return _Round(
        shape=shape,
        began=began,
        ended=time.monotonic(),
        depth=depth,
        messages=tree.messages,
    )


if __name__ == "__main__":
    main()
