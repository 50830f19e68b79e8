"""LitData: a copy of the rows in its own chunks, read by StreamingDataset below StreamingDataLoader."""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peer_loaders.rows import rows_of
from dlac_pipeline.extensions.loader_check.protocol import Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

litdata = importlib.import_module("litdata")

PACKAGES = ["litdata", "torch"]
SHARED_STATE = True
NOT_OFFERED = {
    "filter": "no row filter: a transform maps one row to one",
    "compact": "reads its own copy, which a compaction of the table does not touch",
}
NOTES = [
    "optimize() with one worker, StreamingDataset, StreamingDataLoader; packing: TokensLoader(block_size)",
    "drop_last=False: the default differs between one rank and several, and a state does not load across that",
]


def convert(job: Job) -> int:
    """Write the rows as LitData's chunks."""
    size: dict[str, Any] = {"chunk_size": max(16, job.rows // 32)}
    if job.packed:
        size = {"chunk_size": job.sequence * 64, "item_loader": _tokens()}
    litdata.optimize(
        fn=functools.partial(_rows, packed=job.packed),
        inputs=job.files,
        output_dir=job.own_format,
        num_workers=1,
        reorder_files=False,
        start_method="fork",
        verbose=False,
        **size,
    )
    return sum(path.stat().st_size for path in Path(job.own_format).rglob("*") if path.is_file())


def _rows(file: str, *, packed: bool) -> Iterator[Any]:
    for row_id, _, tokens in rows_of(file):
        array = torch.from_numpy(tokens.copy())
        yield array if packed else {"row_id": row_id, "tokens": array}


def _tokens(block_size: int | None = None) -> Any:
    return importlib.import_module("litdata.streaming.item_loader").TokensLoader(block_size=block_size)


def open_loader(job: Job, state: bytes | None) -> _Loader:
    """Return a loader over the copy."""
    return _Loader(job, state)


class _Loader:
    def __init__(self, job: Job, state: bytes | None) -> None:
        self._packed = job.packed
        dataset = litdata.StreamingDataset(
            job.own_format,
            shuffle=job.shuffle,
            drop_last=False,
            seed=job.seed,
            item_loader=_tokens(job.sequence) if job.packed else None,
        )
        self._loader = litdata.StreamingDataLoader(
            dataset, batch_size=job.rank_batch, num_workers=job.workers, prefetch_factor=job.prefetch
        )
        if state is not None:
            self._loader.load_state_dict(pickle.loads(state))

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Return the next pass. The loader counts passes itself."""
        yield from self._loader

    def ids(self, batch: Any) -> Ids:
        """Return token ids when packing, else row ids."""
        return np.asarray(batch if self._packed else batch["row_id"]).reshape(-1).astype(np.int64)

    def state(self) -> bytes:
        """Return one state for all ranks."""
        return pickle.dumps(self._loader.state_dict())

    def close(self) -> None:
        """Do nothing: the workers end with the loader."""
        del self._loader
