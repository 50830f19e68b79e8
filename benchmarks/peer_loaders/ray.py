"""Ray Data: Parquet files read by a cluster of one node, and split between the ranks as Ray Train does it.

The cluster starts with the import and outlives the launches. Each rank is a driver. That of rank 0 makes the dataset.
"""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from ray.data.collate_fn import ArrowBatchCollateFn

from benchmarks.peer_loaders.ranks import Ranks
from benchmarks.peer_loaders.rows import COLUMNS
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

ray = importlib.import_module("ray")
_pickle = importlib.import_module("ray.cloudpickle")
_data = importlib.import_module("ray.data")
_expressions = importlib.import_module("ray.data.expressions")
_datasource = importlib.import_module("ray.data.datasource")

PACKAGES = ["ray", "torch", "pyarrow"]
SHARED_STATE = True
NOT_OFFERED = {
    "packing": "packs no documents; rows that a resume filters by their id are not those of packed sequences"
}
NOTES = [
    "read_parquet, streaming_split(equal=True), iter_torch_batches, as Ray Train does it; a cluster of one node that runs",
    "no state in the release: user code saves the ids of all consumed rows, and a resume filters them out",
    "that is what ray.train.DatasetCheckpointConfig does, which the documentation of Ray's development version has",
    "user code: ranks step together, as in a training",
    "shuffle: files, and a local buffer of 1,000 rows, at most 1/32 of the table",
]


def _start_cluster() -> str:
    port = free_port()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port)]
    options = ["--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats"]
    sizes = ["--object-store-memory", str(512 << 20), "--temp-dir", tempfile.gettempdir()]
    environment = {**os.environ, "RAY_worker_niceness": "0"}  # by default 15, which starves its workers on a busy node
    process = subprocess.Popen([*command, *options, *sizes], env=environment)
    atexit.register(process.wait)
    atexit.register(process.terminate)
    return f"127.0.0.1:{port}"


_pickle.register_pickle_by_value(sys.modules[__name__])  # a process of the cluster does not import this module
_ADDRESS = _start_cluster()


def open_loader(job: Job, state: bytes | None) -> _Loader:
    """Return a loader over the job's files."""
    return _Loader(job, state)


class _Loader:
    def __init__(self, job: Job, state: bytes | None) -> None:
        self._job, self._ranks = job, Ranks(job.world_size)
        self._seen = np.empty(0, np.int64) if state is None else np.frombuffer(state, np.int64)
        self._own: list[Ids] = []
        for turn in range(job.world_size):  # not at once: forks of one process draw the same random object id
            if turn == job.rank:
                ray.init(address=_ADDRESS, log_to_driver=False)
            self._ranks.gather(None)

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Yield a pass over the rows that are not in the state."""
        job, shuffling = self._job, {}
        shards = None
        if job.rank == 0:
            dataset = self._dataset(pass_number)
            shards = _pickle.dumps(dataset.streaming_split(job.world_size, equal=True))
        if job.shuffle:
            shuffling = {
                "local_shuffle_buffer_size": min(1000, job.rows // 32),
                "local_shuffle_seed": job.seed + pass_number,
            }
        shard = _pickle.loads(self._ranks.gather(shards)[0])[job.rank]
        batches = shard.iter_torch_batches(batch_size=job.rank_batch, collate_fn=_Tensors(), **shuffling)
        for batch in self._ranks.step_together(iter(batches)):
            self._own.append(batch["row_id"].numpy())
            yield batch
        self._seen, self._own = np.empty(0, np.int64), []

    def _dataset(self, pass_number: int) -> Any:
        job = self._job
        order = _datasource.FileShuffleConfig(seed=job.seed + pass_number) if job.shuffle else None
        dataset = _data.read_parquet(job.files, columns=COLUMNS, shuffle=order)
        if job.filtered:
            dataset = dataset.filter(expr=_expressions.col("kind") < KINDS // 2)
        if len(self._seen):
            dataset = dataset.map_batches(_Unseen(self._seen), batch_format="pyarrow", batch_size=None)
        return dataset

    def ids(self, batch: Any) -> Ids:
        """Return row ids."""
        ids: Ids = batch["row_id"].numpy()
        return ids

    def state(self) -> bytes:
        """Return the ids of the rows that all ranks consumed in this pass."""
        own = np.concatenate([np.empty(0, np.int64), *self._own])
        return np.concatenate([self._seen, *self._ranks.gather(own)]).tobytes()

    def close(self) -> None:
        """Exit together, because the rows come from the driver of rank 0."""
        self._ranks.gather(None)
        ray.shutdown()


class _Tensors(ArrowBatchCollateFn):  # type: ignore[misc]  # of an untyped package
    def __call__(self, batch: pa.Table) -> dict[str, torch.Tensor]:
        row_ids = batch["row_id"].to_numpy()
        tokens = batch["tokens"].combine_chunks().flatten().to_numpy().reshape(len(row_ids), -1)
        return {"row_id": torch.from_numpy(row_ids.copy()), "tokens": torch.from_numpy(tokens.copy())}


class _Unseen:
    """A filter of the rows that were not consumed."""

    def __init__(self, seen: Ids) -> None:
        self._seen = ray.put(np.sort(seen))

    def __call__(self, batch: pa.Table) -> pa.Table:
        seen = ray.get(self._seen)
        return batch.filter(pa.array(~np.isin(batch["row_id"].to_numpy(), seen)))
