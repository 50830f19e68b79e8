"""Accelerate: `save_state` and `load_state` as the state of a checkpoint, in a loop of the script's own.

See docs/extensions/trainers.md.
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles


def accelerator_files(accelerator: Accelerator, *models: Any) -> TrainerFiles:
    """Return the engine for `TrainingRun.restore`: all that the accelerator has prepared or registered.

    `models` are checked for NaN before each checkpoint. A step that the loss scaler skipped is recorded as skipped.
    """
    return TrainerFiles(
        lambda folder: Path(accelerator.save_state(str(folder))),
        lambda folder: accelerator.load_state(str(folder)),
        modules={f"model{index or ''}": model for index, model in enumerate(models)},
        applied=lambda: not accelerator.optimizer_step_was_skipped,
    )
