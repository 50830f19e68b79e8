"""Accelerate: `save_state` and `load_state` as the state of a checkpoint, in a loop of the script's own. See docs/trainers.md."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dlac_pipeline.checkpoint.engines import TrainerFiles


def accelerator_files(accelerator: Accelerator, *models: Any) -> TrainerFiles:
    """Return the engine for `TrainingRun.restore`: all that the accelerator has prepared or registered.

    `models` are checked for NaN before each checkpoint. A step that the loss scaler skipped is recorded as skipped.
    """

    def save(folder: Path) -> Path:
        return Path(accelerator.save_state(str(folder)))

    def load(folder: Path) -> None:
        accelerator.load_state(str(folder))

    def applied() -> bool:
        return not accelerator.optimizer_step_was_skipped

    named = {f"model{index or ''}": model for index, model in enumerate(models)}
    return TrainerFiles(save, load, modules=named, applied=applied)
