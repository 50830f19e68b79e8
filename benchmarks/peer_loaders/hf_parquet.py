"""Hugging Face datasets: Parquet files streamed, split by node, below torchdata's StatefulDataLoader."""

import importlib
from typing import Any

import numpy as np

from benchmarks.peer_loaders.rows import COLUMNS
from benchmarks.peer_loaders.stateful import StatefulLoader
from dlac_pipeline.extensions.loader_check.protocol import KINDS, Job

datasets = importlib.import_module("datasets")
distributed = importlib.import_module("datasets.distributed")

PACKAGES = ["datasets", "torchdata", "pyarrow"]
SHARED_STATE = False
NOT_OFFERED: dict[str, str] = {}
NOTES = [
    "load_dataset(streaming=True), split_dataset_by_node, with_format('torch'), StatefulDataLoader",
    "shuffle: buffer of 1,000 rows as by default, at most 1/32 of the table",
    "no change of world size is documented: rank r of the new world is given the state of rank r mod W",
    "packing: batched map over 1,000 documents, the rest of each padded to a sequence (the documented recipe drops it)",
]


def open_loader(job: Job, state: bytes | None) -> StatefulLoader:
    """Return a loader over the data files of the snapshot, in its order."""
    filters = [("kind", "<", KINDS // 2)] if job.filtered else None
    dataset = datasets.load_dataset(
        "parquet", data_files=job.files, split="train", streaming=True, columns=COLUMNS, filters=filters
    )
    return loader_over(dataset, job, state)


def loader_over(dataset: Any, job: Job, state: bytes | None) -> StatefulLoader:
    """Return a loader over the result of `load_dataset`, for any storage format."""
    if job.shuffle:
        dataset = dataset.shuffle(seed=job.seed, buffer_size=min(1000, job.rows // 32))
    if job.packed:
        dataset = dataset.map(_Packer(job.sequence), batched=True, remove_columns=COLUMNS)
    dataset = distributed.split_dataset_by_node(dataset, rank=job.rank, world_size=job.world_size).with_format("torch")
    return StatefulLoader(dataset, job, state, batch_size=job.rank_batch, set_epoch=dataset.set_epoch)


class _Packer:
    """Concatenate the documents of a batch and split them to sequences."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, documents: dict[str, list[Any]]) -> dict[str, list[Any]]:
        tokens = np.concatenate([np.asarray(document, np.int32) for document in documents["tokens"]])
        padding = np.full(-len(tokens) % self._length, -1, np.int32)
        return {"tokens": list(np.concatenate([tokens, padding]).reshape(-1, self._length))}
