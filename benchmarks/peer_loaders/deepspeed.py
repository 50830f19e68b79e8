"""DeepSpeed's own loader: what `deepspeed.initialize(training_data=...)` makes. Its checkpoints hold no position of it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.utils.data import DistributedSampler, TensorDataset

from benchmarks.peer_loaders.rows import COLUMNS, arrays
from dlac_pipeline.extensions.loader_check.protocol import Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

PACKAGES = ["deepspeed", "torch", "pyarrow"]
SHARED_STATE = False
NOT_OFFERED = {"packing": "packs no documents", "filter": "filters no rows"}
NOTES = [
    "DeepSpeedDataLoader over a DistributedSampler, as deepspeed_io makes it; the rows are in memory",
    "no state: a resumed run begins its pass again. DeepSpeedDataSampler has a state_dict with curriculum learning only",
]


class DeepSpeedLoader:
    """One rank's loader."""

    def __init__(self, job: Job) -> None:
        table = _read(job)
        self._sampler: Any = DistributedSampler(
            table, num_replicas=job.world_size, rank=job.rank, shuffle=job.shuffle, seed=job.seed
        )
        self._loader = DeepSpeedDataLoader(
            table,
            job.rank_batch,
            pin_memory=False,
            local_rank=0,
            tput_timer=None,
            num_local_io_workers=job.workers,
            data_sampler=self._sampler,
        )

    def batches(self, pass_number: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of a pass, from its beginning."""
        self._sampler.set_epoch(pass_number)
        for row_ids, tokens in self._loader:
            yield {"row_id": row_ids, "tokens": tokens}

    def ids(self, batch: dict[str, torch.Tensor]) -> Ids:
        """Return row ids."""
        ids: Ids = batch["row_id"].numpy()
        return ids

    def state(self) -> bytes:
        """Return nothing: there is no state."""
        return b""

    def close(self) -> None:
        """Do nothing: it has no processes."""


def open_loader(job: Job, state: bytes | None) -> DeepSpeedLoader:
    """Return a loader over the job's files."""
    return DeepSpeedLoader(job)


def _read(job: Job) -> TensorDataset:
    files = [pq.read_table(file, columns=COLUMNS) for file in job.files]
    row_ids, _, tokens = arrays(pa.concat_tables(files))
    return TensorDataset(torch.from_numpy(row_ids.copy()), torch.from_numpy(np.stack(tokens)))
