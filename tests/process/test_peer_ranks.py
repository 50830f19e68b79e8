"""The ranks of a loader that is compared: they step together."""

import multiprocessing
import os
from typing import Any

from benchmarks.peer_loaders.ranks import Ranks
from dlac_pipeline.elastic.ranks.addresses import free_port


def _step(rank: int, port: int, batches: int, found: Any) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in place.items()}
    ranks = Ranks(2)
    found.put((rank, list(ranks.step_together(iter(range(batches)))), ranks.gather(rank)))


def test_rank_without_batches_waits() -> None:
    """A rank with fewer batches takes part in the steps of its peer, and both end together."""
    context, port = multiprocessing.get_context("fork"), free_port()
    found = context.Queue()
    processes = [context.Process(target=_step, args=(rank, port, 1 + 2 * rank, found)) for rank in range(2)]
    for process in processes:
        process.start()
    results = sorted(found.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert results == [(0, [0], [0, 1]), (1, [0, 1, 2], [0, 1])]
