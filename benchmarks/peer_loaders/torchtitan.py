"""torchtitan's ParallelAwareDataloader over the dataset of `torchdata`: torchtitan's own datasets are texts, always packed."""

import functools
import importlib

from benchmarks.peer_loaders.stateful import StatefulLoader
from benchmarks.peer_loaders.torchdata import RowGroups
from dlac_pipeline.extensions.loader_check.protocol import Job

_dataloader = importlib.import_module("torchtitan.components.dataloader")

PACKAGES = ["torchtitan", "torchdata", "torch"]
SHARED_STATE = False
NOT_OFFERED: dict[str, str] = {}
NOTES = ["ParallelAwareDataloader(dataset, dp_rank, dp_world_size, batch_size=None) over the dataset of `torchdata`"]


def open_loader(job: Job, state: bytes | None) -> StatefulLoader:
    """Return a loader over the job's files."""
    dataset = RowGroups(job)
    make = functools.partial(_dataloader.ParallelAwareDataloader, dp_rank=job.rank, dp_world_size=job.world_size)
    return StatefulLoader(dataset, job, state, batch_size=None, set_epoch=dataset.set_epoch, make=make)
