"""torchft's DistributedSampler below torchdata's StatefulDataLoader, as torchft's `train_ddp.py` sets them up.

Each rank is a replica group of one process. The dataset has random access, and the rows of all files in memory.
"""

import importlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.peer_loaders.rows import rows_of
from benchmarks.peer_loaders.stateful import StatefulLoader
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job

_data = importlib.import_module("torchft.data")

PACKAGES = ["torchft", "torchdata", "torch"]
SHARED_STATE = False
NOT_OFFERED = {"packing": "a sampler of rows"}
NOTES = [
    "DistributedSampler(replica_rank, num_replica_groups, group_rank=0, num_replicas=1), StatefulDataLoader",
    "no change of the number of groups is documented: rank r of the new world is given the state of rank r mod W",
    "filter: rows are left out when the dataset is made",
]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of all files."""

    def __init__(self, job: Job) -> None:
        rows = [row for file in job.files for row in rows_of(file)]
        self._rows = [(row_id, tokens) for row_id, kind, tokens in rows if not job.filtered or kind < KINDS // 2]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row_id, tokens = self._rows[index]
        return {"row_id": torch.tensor(row_id), "tokens": torch.from_numpy(np.array(tokens))}


def open_loader(job: Job, state: bytes | None) -> StatefulLoader:
    """Return a loader over the job's files."""
    dataset = Rows(job)
    sampler: Any = _data.DistributedSampler(
        dataset,
        replica_rank=job.rank,
        num_replica_groups=job.world_size,
        group_rank=0,
        num_replicas=1,
        shuffle=job.shuffle,
        seed=job.seed,
    )
    batch_size, set_epoch = job.rank_batch, sampler.set_epoch
    return StatefulLoader(dataset, job, state, batch_size=batch_size, set_epoch=set_epoch, sampler=sampler)
