"""Data-lake-aware checkpointing: the library that a training script uses.

All of it comes with PyTorch, and is imported on first use: commands which do not train start without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.engines import TorchState
    from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
    from dlac_pipeline.dataset import DlacDataset, open_dataset
    from dlac_pipeline.extensions.replicas.torchft_state import TorchFTState
    from dlac_pipeline.read.batch import Batch
    from dlac_pipeline.train.training_run import TrainingRun, training_run

__all__ = [
    "Batch",
    "DistributedState",
    "DlacDataset",
    "TorchFTState",
    "TorchState",
    "TrainingRun",
    "open_dataset",
    "training_run",
]

_HOMES = {
    "Batch": "dlac_pipeline.read.batch",
    "DistributedState": "dlac_pipeline.checkpoint.engines.distributed_state",
    "DlacDataset": "dlac_pipeline.dataset",
    "TorchFTState": "dlac_pipeline.extensions.replicas.torchft_state",
    "TorchState": "dlac_pipeline.checkpoint.engines",
    "TrainingRun": "dlac_pipeline.train.training_run",
    "open_dataset": "dlac_pipeline.dataset",
    "training_run": "dlac_pipeline.train.training_run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
