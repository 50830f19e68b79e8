"""A Hugging Face `Trainer` that keeps the dataset's state beside its checkpoints."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from dlac_pipeline.dataset.dataset import DlacDataset
from dlac_pipeline.dataset.state import STATE_FILE, read_state
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.errors import ResumeMismatch, SpecInvalid, TrainingFailed


def trainer_callback(dataset: DlacDataset) -> Any:
    """A `transformers.TrainerCallback` that keeps the dataset's state in `checkpoint-N/dlac_reader.json`, and resumes from it.

    The Trainer must read through `dataset.loader()` (override `get_train_dataloader`), with ignore_data_skip=True. The state is
    written last: a checkpoint without it was not finished, and `last_checkpoint` passes it over.
    """
    base = import_module("transformers").TrainerCallback
    return type("PositionCallback", (_PositionCallback, base), {})(dataset)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest checkpoint of a Trainer that contains a dataset's state, or None."""
    folders = [path.parent for path in Path(output_dir).glob(f"checkpoint-*/{STATE_FILE}")]
    return str(max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))) if folders else None


class _PositionCallback:
    """The callback of `trainer_callback`, without the base class."""

    def __init__(self, dataset: DlacDataset) -> None:
        self._dataset = dataset
        self._offset = 0
        """Batches before the Trainer's first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check settings that would not be exact. Move to the checkpoint's position."""
        _check_arguments(args, self._dataset)
        if state.global_step:
            saved = read_state(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            if saved["leg"]["digest"] != self._dataset.state_dict()["leg"]["digest"]:
                raise ResumeMismatch(
                    "expected the dataset on the snapshot and settings of the checkpoint, found others: open it with "
                    "open_dataset(..., state=last_checkpoint(output_dir))"
                )
            self._dataset.load_state_dict(saved)
        self._offset = self._dataset.step - state.global_step * args.gradient_accumulation_steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state beside the checkpoint that was just saved."""
        trained = self._offset + state.global_step * args.gradient_accumulation_steps
        if trained != self._dataset.step:
            raise TrainingFailed(
                f"expected the Trainer to have trained on the batches up to step {self._dataset.step}, which it was given, found "
                f"that it is at {trained}: let get_train_dataloader return dataset.loader(...)"
            )
        saved = self._dataset.gathered_state()
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE
            write_durably(path, json.dumps(saved).encode())


def _check_arguments(args: Any, dataset: DlacDataset) -> None:
    """Check those TrainingArguments with which a run could not be resumed exactly."""
    wrong = []
    if not args.ignore_data_skip:
        wrong.append("ignore_data_skip=True, for the dataset itself goes to its position")
    if args.save_total_limit == 1:
        wrong.append("save_total_limit of 2 or more, for the older checkpoint goes before the newer one is complete")
    if args.max_steps <= 0 and args.num_train_epochs != 1:
        wrong.append("num_train_epochs=1, for the passes are those of the dataset")
    if args.gradient_accumulation_steps > 1 and (
        any(dataset.leg.streamed) or len(dataset) % args.gradient_accumulation_steps
    ):
        wrong.append(
            "a number of batches that gradient_accumulation_steps divides, or the last of them are not applied"
        )
    if dataset.may_end_unevenly:
        raise SpecInvalid(
            f"expected last_batch='drop' or 'pad' for a Trainer on {dataset.world_size} ranks, found 'partial': a rank without "
            "samples in the last batch would have a loss of NaN, and ranks with fewer would count as much as the others; give "
            "open_dataset() last_batch='drop', or 'pad' and mask what batch['dlac']['valid'] marks"
        )
    if wrong:
        raise SpecInvalid("expected of the TrainingArguments:\n  " + "\n  ".join(wrong))
