"""Data-lake-aware checkpointing: the library that a training script uses.

All of it comes with PyTorch, and is imported on first use: commands which do not train start without it. Extensions add names.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlac_pipeline.checkpoint.engines import TorchState
    from dlac_pipeline.read.batch import Batch
    from dlac_pipeline.train.training_run import TrainingRun, training_run

__all__ = [
    "Batch",
    "TorchState",
    "TrainingRun",
    "training_run",
]

_HOMES = {
    "Batch": "dlac_pipeline.read.batch",
    "TorchState": "dlac_pipeline.checkpoint.engines",
    "TrainingRun": "dlac_pipeline.train.training_run",
    "training_run": "dlac_pipeline.train.training_run",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if (
        not name.startswith("_") and not Path(__file__).with_name(name).exists()
    ):  # Python asks for its folders here, too
        from dlac_pipeline.lakehouse.doors import Door

        names = Door("dlac.names", "name of dlac_pipeline")
        if name in names.points():
            return names.load(name, setting="dlac_pipeline")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
