"""DLRover's dynamic sharding: its master hands out ranges of row numbers, and its checkpoint has the ranges that are not done.

Each launch has a master of its own, which is forked from a process that has imported it. On a cluster it runs already.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peer_loaders.ranks import Ranks
from benchmarks.peer_loaders.rows import rows_of
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

_arguments = importlib.import_module("dlrover.python.master.args")
_master = importlib.import_module("dlrover.python.master.main")
_clients = importlib.import_module("dlrover.python.elastic_agent.master_client")
_sharding = importlib.import_module("dlrover.python.elastic_agent.sharding.client")
importlib.import_module("dlrover.python.master.local_master")  # imported here, and not in a timed launch

PACKAGES = ["dlrover", "torch", "pyarrow"]
SHARED_STATE = True
NOT_OFFERED = {"packing": "hands out numbers of rows"}
NOTES = [
    "ShardingClient(storage_type='text', num_minibatches_per_shard=1), report_batch_done after each batch, a dataset per pass",
    "a shard is a batch of a rank: of larger ones, as by default (10 batches), the begun ones would be read again",
    "restored with MasterClient.report_shard_checkpoint: restore_shard_from_checkpoint wraps it twice, and the master refuses it",
    "user code: ranks step together; rank 0 saves get_shard_checkpoint() when all have reported their batch",
    "user code: rows of all files in memory; the state has the files, so that a resume reads those of the run's start",
]


def open_loader(job: Job, state: bytes | None) -> _Loader:
    """Return a loader over the job's files, or those of the state."""
    return _Loader(job, state)


class _Loader:
    def __init__(self, job: Job, state: bytes | None) -> None:
        self._job = job
        self._state = None if state is None else json.loads(state)
        self._files = self._state["files"] if self._state else job.files
        self._process = None
        if job.rank == 0:
            port = free_port()
            self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(port,), daemon=True)
            self._process.start()
        self._ranks = Ranks(job.world_size)
        os.environ |= {
            "DLROVER_MASTER_ADDR": self._ranks.gather(f"127.0.0.1:{port}" if self._process else "")[0],
            "NODE_ID": str(job.rank),
        }
        rows = [row for file in self._files for row in rows_of(file)]
        self._rows = [(row_id, tokens) for row_id, kind, tokens in rows if not job.filtered or kind < KINDS // 2]
        self._client: Any = None
        self._unreported = 0

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Yield a pass, which is a dataset of its own for the master."""
        _wait_until_served()
        self._client = _sharding.ShardingClient(
            dataset_name=f"pass-{pass_number}",
            batch_size=self._job.rank_batch,
            num_epochs=1,
            dataset_size=len(self._rows),
            shuffle=self._job.shuffle,
            num_minibatches_per_shard=1,
            storage_type="text",
        )
        if self._state and self._job.rank == 0:
            master = _clients.MasterClient.singleton_instance()
            if not master.report_shard_checkpoint(self._state["shards"]).success:
                raise RuntimeError("expected DLRover's master to restore its shards, found that it did not")
        self._state = None
        self._ranks.gather(None)  # no rank fetches before the shards are restored
        yield from self._ranks.step_together(self._shards())

    def _shards(self) -> Iterator[Any]:
        while shard := self._client.fetch_shard():
            numbers = shard.indices or range(shard.start, shard.end)
            row_ids, tokens = zip(*(self._rows[number] for number in numbers), strict=True)
            self._unreported = len(row_ids)
            yield np.array(row_ids), np.stack(tokens)
            self._report()

    def _report(self) -> None:
        if self._unreported:
            self._client.report_batch_done(self._unreported)
        self._unreported = 0

    def ids(self, batch: Any) -> Ids:
        """Return row ids."""
        ids: Ids = batch[0]
        return ids

    def state(self) -> bytes:
        """Return the master's checkpoint, after all ranks have reported their batch and before they fetch the next one."""
        self._report()
        self._ranks.gather(None)
        shards = self._ranks.gather(self._client.get_shard_checkpoint() if self._job.rank == 0 else None)[0]
        return json.dumps({"files": self._files, "shards": shards}).encode()

    def close(self) -> None:
        """Exit together, because the ranks ask the master of rank 0."""
        self._ranks.gather(None)
        if self._process:
            self._process.kill()


def _serve(port: int) -> None:
    command = ["--platform", "local", "--port", str(port), "--node_num", "1", "--job_name", "peer"]
    _master.run(_arguments.parse_master_args(command))


def _wait_until_served() -> None:
    host, port = os.environ["DLROVER_MASTER_ADDR"].split(":")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
            return
        time.sleep(0.01)
    raise RuntimeError("expected DLRover's master to answer within 30 s")
