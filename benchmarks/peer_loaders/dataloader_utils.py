"""torch-dataloader-utils: its `IcebergDataset` below its DataLoader, with its state of completed shards."""

import importlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.compute as pc

from benchmarks.peer_loaders.rows import COLUMNS
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

_iceberg = importlib.import_module("torch_dataloader_utils.dataset.iceberg")
for _lazy in ("pyiceberg.catalog.sql", "pyiceberg.io.pyarrow", "torch_dataloader_utils.format.reader"):
    importlib.import_module(_lazy)  # here, and not in a timed launch

PACKAGES = ["torch-dataloader-utils", "pyiceberg", "pyarrow"]
SHARED_STATE = False
NOT_OFFERED = {"packing": "it yields rows as they are in the table"}
NOTES = [
    "IcebergDataset.create_dataloader on the current snapshot, output_format='numpy', dataset.state_dict()",
    "shuffle: its order of splits, and its buffer of 1,000 rows, at most 1/32 of the table",
]


class IcebergLoader:
    """A loader. Its state has the shards that a worker has ended."""

    def __init__(self, job: Job, state: bytes | None) -> None:
        self._loader, self._dataset = _iceberg.IcebergDataset.create_dataloader(
            table=job.table,
            catalog_config=dict(job.catalog),
            batch_size=job.rank_batch,
            columns=COLUMNS,
            filters=pc.field("kind") < KINDS // 2 if job.filtered else None,
            shuffle=job.shuffle,
            shuffle_seed=job.seed,
            shuffle_buffer_size=min(1000, job.rows // 32) if job.shuffle else None,
            num_workers=job.workers,
            output_format="numpy",
            num_ranks=job.world_size,
            rank=job.rank,
        )
        self._resumed = state is not None
        if state is not None:
            self._dataset.load_state_dict(pickle.loads(state))

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Yield the batches of a pass."""
        if not self._resumed:  # a loaded state has its pass, as documented
            self._dataset.set_epoch(pass_number)
        self._resumed = False
        yield from self._loader

    def ids(self, batch: Any) -> Ids:
        """Return row ids."""
        return np.asarray(batch["row_id"]).astype(np.int64)

    def state(self) -> bytes:
        """Return the shards that are completed."""
        return pickle.dumps(self._dataset.state_dict())

    def close(self) -> None:
        """Do nothing: the workers end with the loader."""


def open_loader(job: Job, state: bytes | None) -> IcebergLoader:
    """Return a loader over the current table."""
    return IcebergLoader(job, state)
