"""LanceDB: a copy of the rows in a Lance table, read by its StreamingDataset below torch's DataLoader.

A later conversion writes a new version of the table. The state has the version, so that a resume reads that of the run's start.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchmarks.peer_loaders.ranks import Ranks
from benchmarks.peer_loaders.rows import COLUMNS
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

lancedb = importlib.import_module("lancedb")
_streaming = importlib.import_module("lancedb.streaming")

_SPLITS = 4
"""A multiple of every world size, as a change of it asks for."""
_END, _PADDING = -2, -1

PACKAGES = ["lancedb", "pylance", "torch"]
SHARED_STATE = True
NOT_OFFERED = {"compact": "reads its own copy, which a compaction of the table does not touch"}
NOTES = [
    f"StreamingDataset(num_splits={_SPLITS}), DataLoader(num_workers=0), which its documentation advises: it reads in threads",
    "the states of all ranks are gathered and merged with merge_state_dicts, as documented",
    "user code: a conversion is a new version of the table; a resume checks out that of the run's start ('the same snapshot')",
    "packing: blocks_per_epoch is counted beforehand, so that no token is left out",
]


def convert(job: Job) -> int:
    """Write the rows as a new version of the Lance table, and return the bytes that it adds."""
    before = _size(job)
    rows = pa.concat_tables(pq.read_table(file, columns=COLUMNS) for file in job.files)
    if not job.packed:  # all of one length
        tokens = rows["tokens"].combine_chunks().flatten()
        rows = rows.set_column(2, "tokens", pa.FixedSizeListArray.from_arrays(tokens, job.sequence))
    lancedb.connect(_folder(job)).create_table("rows", rows, mode="overwrite")
    return _size(job) - before


def _folder(job: Job) -> Path:
    return Path(f"{job.own_format}-lancedb")  # beside the given folder, which is emptied before each conversion


def _size(job: Job) -> int:
    return sum(path.stat().st_size for path in _folder(job).rglob("*") if path.is_file())


def open_loader(job: Job, state: bytes | None) -> _Loader:
    """Return a loader over the copy."""
    return _Loader(job, state)


class _Loader:
    def __init__(self, job: Job, state: bytes | None) -> None:
        self._job, self._ranks = job, Ranks(job.world_size)
        self._table = lancedb.connect(_folder(job)).open_table("rows")
        self._state = None if state is None else json.loads(state)
        if self._state is not None:
            self._table.checkout(self._state["version"])
        self._dataset: Any = None

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Yield a pass, each shuffled with another seed."""
        job = self._job
        self._dataset = _streaming.StreamingDataset(
            self._table,
            num_splits=_SPLITS,
            shuffle=job.shuffle,
            shuffle_seed=job.seed,
            epoch=pass_number,
            rank=job.rank,
            world_size=job.world_size,
            filter=f"kind < {KINDS // 2}" if job.filtered else None,
            transform_parallelism=max(1, job.workers),
            **(self._packing() if job.packed else {"columns": ["row_id", "tokens"], "transform": _samples}),
        )
        if self._state is not None:
            self._dataset.load_state_dict(self._state["dataset"])
            self._state = None
        yield from torch.utils.data.DataLoader(self._dataset, batch_size=job.rank_batch)

    def _packing(self) -> dict[str, Any]:
        lengths = pc.list_value_length(self._table.to_lance().to_table(["tokens"])["tokens"]).to_numpy() + 1
        splits = lengths[: len(lengths) // _SPLITS * _SPLITS].reshape(_SPLITS, -1).sum(axis=1)
        return {
            "columns": ["tokens"],
            "pack_sequences": self._job.sequence,
            "eos_id": _END,
            "pad_id": _PADDING,
            "blocks_per_epoch": int(-(-splits.max() // self._job.sequence)) * _SPLITS,
        }

    def ids(self, batch: Any) -> Ids:
        """Return token ids when packing, else row ids."""
        ids: Ids = np.asarray(batch["input_ids"] if self._job.packed else batch[0]).reshape(-1)
        return ids

    def state(self) -> bytes:
        """Return the merged states of all ranks."""
        merged = _streaming.StreamingDataset.merge_state_dicts(self._ranks.gather(self._dataset.state_dict()))
        return json.dumps({"version": self._table.version, "dataset": merged}).encode()

    def close(self) -> None:
        """Exit together."""
        self._ranks.gather(None)


def _samples(batch: pa.RecordBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    row_ids = torch.from_numpy(batch["row_id"].to_numpy())
    tokens = torch.from_numpy(batch["tokens"].flatten().to_numpy().reshape(len(row_ids), -1))
    return list(zip(row_ids, tokens, strict=True))
