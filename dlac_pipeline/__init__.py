"""Data-lake-aware checkpointing: the library that a training script uses.

All of it comes with PyTorch, and is imported on first use: commands which do not train start without it. Extensions add names.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.engines import TorchState
    from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
    from dlac_pipeline.dataset import DlacDataset, open_dataset
    from dlac_pipeline.read.batch import Batch
    from dlac_pipeline.train.training_run import TrainingRun, training_run

__all__ = [
    "Batch",
    "DistributedState",
    "DlacDataset",
    "TorchState",
    "TrainingRun",
    "open_dataset",
    "training_run",
]

_HOMES = {
    "Batch": "dlac_pipeline.read.batch",
    "DistributedState": "dlac_pipeline.checkpoint.engines.distributed_state",
    "DlacDataset": "dlac_pipeline.dataset",
    "TorchState": "dlac_pipeline.checkpoint.engines",
    "TrainingRun": "dlac_pipeline.train.training_run",
    "open_dataset": "dlac_pipeline.dataset",
    "training_run": "dlac_pipeline.train.training_run",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from importlib.metadata import entry_points

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    # Extensions add classes. Python asks for submodules here before it imports them.
    for point in entry_points(group="dlac.names", name=name) if name[:1].isupper() else ():
        return point.load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
