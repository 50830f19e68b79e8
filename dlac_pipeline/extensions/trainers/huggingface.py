"""The Hugging Face `Trainer`: its saves become checkpoints of a training run, with the consumed rows.

See docs/extensions/trainers.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dlac_pipeline.extensions.trainers.run_loader import RunLoader, weigh
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles
from dlac_pipeline.lakehouse.errors import ResumeMismatch, ScriptInvalid, SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.train.training_run import TrainingRun

_IGNORED, _LABELS = -100, ("labels", "shift_labels")
"""The label that the Trainer and its models do not count, and the names of labels that the Trainer counts."""


def attach(trainer: Trainer, run: TrainingRun, inputs: Callable[[Batch], Any]) -> str | None:
    """Let a `Trainer` read the batches of a run, and commit a checkpoint at each of its saves.

    `inputs` makes the keyword arguments of the model of a micro-batch. The loss is weighed here, so that each sample counts
    once, unless `inputs` uses `batch.weight`. Return the folder for `trainer.train(resume_from_checkpoint=...)`, or None at the
    start of the run. Raise `SpecInvalid` for settings with which the Trainer could not resume exactly. Otherwise raises as
    `TrainingRun.restore`.
    """
    args = trainer.args
    _check_arguments(args, run)
    args.ignore_data_skip = True  # the run itself resumes at its position
    callback = DlacCallback(trainer, run)
    run.restore(callback.files)
    loader = callback.load(inputs, micro_batches=args.gradient_accumulation_steps)
    trainer.get_train_dataloader = lambda: loader
    trainer.compute_loss = callback.weighing(trainer.compute_loss)
    trainer.training_step = callback.summing(trainer.training_step)
    trainer.add_callback(callback)
    return None if callback.files.folder is None else str(callback.files.folder)


class DlacCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not analyzed
    """The callback of `attach`: the end of an optimizer step, and the Trainer's saves."""

    def __init__(self, trainer: Trainer, run: TrainingRun) -> None:
        self._trainer, self._run = trainer, run
        self._loss: torch.Tensor | float = 0.0
        self._trains = self._sums = False
        """True in a training step, and in one whose loss is a sum over labels that is divided by the labels of the step."""
        self._weight: float | None = None
        """The weight of the micro-batch that is being trained, once its loss has it."""
        self.files = TrainerFiles(
            self._saved_folder,
            modules={"model": trainer.model},
            applied=lambda: not trainer.accelerator.optimizer_step_was_skipped,
        )

    def load(self, inputs: Callable[[Batch], Any], *, micro_batches: int) -> RunLoader:
        """Return the loader. The labels of a micro-batch without a sample are masked: the Trainer may count them."""

        def masked(batch: Batch) -> Any:
            found = inputs(batch)
            counts = self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func is not None
            if not counts or batch.rows == self._run.spec.order.batch_size or batch.valid.any():
                return found
            return {**found, **{name: torch.full_like(found[name], _IGNORED) for name in _LABELS if name in found}}

        loader: RunLoader = self._run.loader(masked, micro_batches=micro_batches)
        self._loader = loader
        return loader

    def weighing(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return the Trainer's `compute_loss`, which gives the loss of a training step the weight of its micro-batch."""

        def weighed(*args: Any, **kwargs: Any) -> Any:
            found = compute_loss(*args, **kwargs)
            if not self._trains:  # it evaluates
                return found
            if self._weight is None:
                self._weight = self._loader.next_weight()
            # a sum is divided by the number of all labels of the step
            weight = float(self._weight > 0) if self._sums else self._weight
            return (weigh(found[0], weight), *found[1:]) if isinstance(found, tuple) else weigh(found, weight)

        return weighed

    def summing(self, training_step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the Trainer's `training_step`, with the losses of micro-batches summed up here."""

        def step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            self._sums = num_items_in_batch is not None and self._trainer.loss_is_scaled_for_ga is not False
            self._trains, self._weight = True, None
            loss = training_step(model, inputs, num_items_in_batch)
            self._trains = False
            if self._weight is None and self._loader.next_weight() != 1:
                raise ScriptInvalid(
                    "expected training_step to get its loss from the Trainer's compute_loss, which gives it the weight of a "
                    "micro-batch with fewer samples, found that it does not: call it, or use batch.weight in inputs(batch)"
                )
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
        # the Trainer counts the batches since it was started
        state.epoch = state.global_step / (self._run.total_steps or args.max_steps)
        due = self._run.record_step(loss)
        self._stop_if_asked(control)
        if due or (control.should_training_stop and not self._run.stopped):
            control.should_save = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the Trainer save if another callback stops it early."""
        if control.should_training_stop and not self._run.stopped:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Commit the Trainer's last save."""
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
    if run.world_size > 1 and not args.average_tokens_across_devices:
        wrong.append(
            "average_tokens_across_devices=True: the ranks may have different numbers of samples in the last batch"
        )
    if args.auto_find_batch_size:
        wrong.append("auto_find_batch_size=False: the job spec has the batch size")
    if wrong:
        raise SpecInvalid("expected of the TrainingArguments:\n  " + "\n  ".join(wrong))
