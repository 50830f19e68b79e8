"""The Hugging Face `Trainer`: its saves become checkpoints of a training run, with what was consumed. See docs/trainers.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dlac_pipeline.checkpoint.engines import TrainerFiles
from dlac_pipeline.lakehouse.errors import ResumeMismatch, ScriptInvalid, SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.train.training_run import TrainingRun


def attach(trainer: Trainer, run: TrainingRun, inputs: Callable[[Batch], Any]) -> str | None:
    """Let a `Trainer` read the batches of a run, and commit a checkpoint at each of its saves.

    `inputs` makes the keyword arguments of the model of a batch. It masks empty slots, as `batch.valid` marks them. Return the
    folder for `trainer.train(resume_from_checkpoint=...)`, or None at the start of the run. Raise `SpecInvalid` for settings with
    which the Trainer could not resume exactly. Otherwise raises as `TrainingRun.restore`.
    """
    args = trainer.args
    _check_arguments(args, run)
    args.ignore_data_skip = True  # the run itself resumes at its position
    callback = DlacCallback(trainer, run)
    run.restore(callback.files)
    loader = run.loader(inputs, micro_batches=args.gradient_accumulation_steps)
    trainer.get_train_dataloader = lambda: loader
    trainer.training_step = callback.summing(trainer.training_step)
    trainer.add_callback(callback)
    return None if callback.files.folder is None else str(callback.files.folder)


class DlacCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not analyzed
    """The callback of `attach`: the end of an optimizer step, and the Trainer's saves."""

    def __init__(self, trainer: Trainer, run: TrainingRun) -> None:
        self._trainer, self._run = trainer, run
        self._loss: torch.Tensor | float = 0.0
        self.files = TrainerFiles(
            self._saved_folder,
            modules={"model": trainer.model},
            applied=lambda: not trainer.accelerator.optimizer_step_was_skipped,
        )

    def summing(self, training_step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the Trainer's `training_step`, with the losses of micro-batches summed up here."""

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = training_step(*args, **kwargs)
            self._loss = self._loss + loss
            return loss

        return step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the Trainer is at the step of the ledger."""
        if state.global_step != self._run.step:
            raise ResumeMismatch(
                f"expected the Trainer to resume at step {self._run.step}, as the ledger has it, found it at step "
                f"{state.global_step}: call trainer.train(resume_from_checkpoint=attach(trainer, run, ...))"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the optimizer step, and let the Trainer save if a checkpoint is due."""
        loss, self._loss = self._loss, 0.0
        due = self._run.record_step(loss)
        self._stop_if_asked(control)
        if due or (control.should_training_stop and not self._run.stopped):
            control.should_save = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the Trainer save if another callback stops it early."""
        if control.should_training_stop and not self._run.stopped:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Commit what the Trainer has just saved."""
        self._run.checkpoint()
        self._stop_if_asked(control)

    def _stop_if_asked(self, control: Any) -> None:
        if self._run.stopped:
            control.should_training_stop = True

    def _saved_folder(self, folder: Path) -> Path:
        step = self._trainer.state.global_step
        saved = Path(self._trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if not (saved / "trainer_state.json").exists() and self._trainer.args.should_save:
            raise ScriptInvalid(
                f"expected a checkpoint of the Trainer in {str(saved)!r}, found none: stop training through the Trainer's "
                "control, so that it saves its last step"
            )
        return saved


def _check_arguments(args: Any, run: TrainingRun) -> None:
    """Check the TrainingArguments with which the Trainer could not resume exactly, or would train on something else."""
    wrong = []
    if args.save_only_model:
        wrong.append("save_only_model=False: optimizer and schedule are part of a checkpoint")
    if args.max_steps <= 0 and (args.num_train_epochs != 1 or run.total_steps is None):
        wrong.append(f"max_steps={run.total_steps or 'a number'}: the job spec makes the passes")
    if args.auto_find_batch_size:
        wrong.append("auto_find_batch_size=False: the job spec has the batch size")
    if wrong:
        raise SpecInvalid("expected of the TrainingArguments:\n  " + "\n  ".join(wrong))
