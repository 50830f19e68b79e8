"""MosaicML Streaming: a copy of the rows in MDS, read by StreamingDataset below StreamingDataLoader.

`streaming` imports its vision datasets, and with them torchvision, whose wheels do not load with a CPU build of torch.
An empty module replaces them. The rest of the package is unchanged.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.peer_loaders.rows import rows_of
from dlac_pipeline.extensions.loader_check.protocol import Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
streaming = importlib.import_module("streaming")
_BEGUN = time.time()
_SHARED = Path("/dev/shm")

PACKAGES = ["mosaicml-streaming", "torch", "numpy"]
SHARED_STATE = True
NOT_OFFERED = {
    "filter": "StreamingDataset reads whole shards; rows are filtered when converting",
    "packing": "sequences are packed when converting",
    "compact": "reads its own copy, which a compaction of the table does not touch",
}
NOTES = ["StreamingDataset(local=...) with defaults; stale shared memory is cleaned before opening, as documented"]


def convert(job: Job) -> int:
    """Write the rows as MDS."""
    columns = {"row_id": "int64", "tokens": f"ndarray:int32:{job.sequence}"}
    limit = max(1 << 16, job.rows * (job.sequence * 4 + 8) // 32)
    with streaming.MDSWriter(out=job.own_format, columns=columns, size_limit=min(limit, 1 << 26)) as writer:
        for file in job.files:
            for row_id, _, tokens in rows_of(file):
                writer.write({"row_id": np.int64(row_id), "tokens": tokens})
    return sum(path.stat().st_size for path in Path(job.own_format).rglob("*") if path.is_file())


def open_loader(job: Job, state: bytes | None) -> _Loader:
    """Return a loader over the MDS copy."""
    return _Loader(job, state)


class _Loader:
    def __init__(self, job: Job, state: bytes | None) -> None:
        if job.world_size > 1:
            torch.distributed.init_process_group("gloo")
        _clean_shared_memory()
        self._dataset = streaming.StreamingDataset(
            local=job.own_format, batch_size=job.rank_batch, shuffle=job.shuffle, shuffle_seed=job.seed
        )
        self._loader = streaming.StreamingDataLoader(
            self._dataset, batch_size=job.rank_batch, num_workers=job.workers, prefetch_factor=job.prefetch
        )
        if state is not None:
            self._loader.load_state_dict(json.loads(state))

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Return the next pass. The dataset counts passes itself."""
        yield from self._loader

    def ids(self, batch: Any) -> Ids:
        """Return row ids."""
        return np.asarray(batch["row_id"]).reshape(-1).astype(np.int64)

    def state(self) -> bytes:
        """Return one state for all ranks."""
        return json.dumps(self._loader.state_dict()).encode()

    def close(self) -> None:
        """Exit together, like ranks that train together, and release the shared memory."""
        del self._loader
        del self._dataset
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        _clean_shared_memory()


def _clean_shared_memory() -> None:
    importlib.import_module("streaming.base.util").clean_stale_shared_memory()


@atexit.register
def _remove_leaked() -> None:
    """Remove shared memory of killed ranks. The package's own cleaning stops at the first free number."""
    for path in _SHARED.glob("[0-9]*_*"):
        with contextlib.suppress(OSError):
            if re.fullmatch(r"\d{6}_[a-z_]+", path.name) and path.stat().st_ctime >= _BEGUN:
                path.unlink()
