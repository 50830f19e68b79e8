"""Grain: a copy of the rows in ArrayRecord, random access, batched and sharded by ElasticIterator.

If ElasticIterator is unsupported (filter, packing), the dataset's own iterator with its own state is used instead.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_loaders.rows import rows_of
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job
from dlac_pipeline.extensions.loader_check.row_log import Ids

grain = importlib.import_module("grain")
records = importlib.import_module("array_record.python.array_record_module")

PACKAGES = ["grain", "array-record"]
SHARED_STATE = True
NOT_OFFERED = {"compact": "reads its own copy, which a compaction of the table does not touch"}
NOTES = ["ArrayRecord with group_size:1; ElasticIterator; ReadOptions with as many threads as others have workers"]


def convert(job: Job) -> int:
    """Write the rows as ArrayRecord."""
    path = Path(job.own_format) / "rows.arrayrecord"
    path.parent.mkdir(parents=True)
    writer = records.ArrayRecordWriter(str(path), "group_size:1")
    for file in job.files:
        for row_id, kind, tokens in rows_of(file):
            writer.write(np.array([row_id, kind], np.int64).tobytes() + tokens.tobytes())
    writer.close()
    return path.stat().st_size


def _decoded(record: bytes) -> dict[str, Any]:
    row_id, kind = np.frombuffer(record, np.int64, count=2)
    return {"row_id": row_id, "kind": kind, "tokens": np.frombuffer(record, np.int32, offset=16)}


def open_loader(job: Job, state: bytes | None) -> _Loader:
    """Return a loader over the copy."""
    return _Loader(job, state)


class _Loader:
    def __init__(self, job: Job, state: bytes | None) -> None:
        self._job, self._state = job, state
        self._iterator: Any = None

    def batches(self, pass_number: int) -> Iterator[Any]:
        """Yield a pass, each shuffled with another seed."""
        source = grain.sources.ArrayRecordDataSource(f"{self._job.own_format}/rows.arrayrecord")
        dataset = grain.MapDataset.source(source)
        if self._job.shuffle:
            dataset = dataset.shuffle(seed=self._job.seed + pass_number)
        self._iterator = self._open(dataset.map(_decoded))
        if self._state is not None:
            self._iterator.set_state(json.loads(self._state))
            self._state = None
        yield from self._iterator

    def _open(self, dataset: Any) -> Any:
        job = self._job
        reading = grain.ReadOptions(num_threads=job.workers, prefetch_buffer_size=4 * job.rank_batch)
        if not job.filtered and not job.packed:
            shard = grain.sharding.ShardOptions(shard_index=job.rank, shard_count=job.world_size)
            elastic = grain.experimental.ElasticIterator
            return iter(elastic(dataset, job.batch_size, shard, read_options=reading))
        if job.filtered:
            dataset = dataset.filter(_is_kept)
        rows = dataset[job.rank :: job.world_size].to_iter_dataset(reading)
        if job.packed:
            pack = grain.experimental.ConcatThenSplitIterDataset
            rows = pack(rows.map(_tokens), length_struct={"tokens": job.sequence})
        return iter(rows.batch(job.rank_batch))

    def ids(self, batch: Any) -> Ids:
        """Return token ids when packing, else row ids."""
        if not self._job.packed:
            return np.asarray(batch["row_id"]).reshape(-1).astype(np.int64)
        tokens = np.where(batch["tokens_segment_ids"] > 0, batch["tokens"], -1)
        return tokens.reshape(-1).astype(np.int64)

    def state(self) -> bytes:
        """Return the iterator's own state."""
        return json.dumps(self._iterator.get_state()).encode()

    def close(self) -> None:
        """Stop the reading threads."""
        self._iterator.close()


def _is_kept(row: dict[str, Any]) -> bool:
    return bool(row["kind"] < KINDS // 2)


def _tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["tokens"]}
