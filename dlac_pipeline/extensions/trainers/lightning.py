"""Lightning: the batches of a training run as a data module, and its checkpoints by a callback.

See docs/extensions/trainers.md.
"""

import functools
import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from dlac_pipeline.extensions.trainers.run_loader import RunLoader, weigh
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles
from dlac_pipeline.lakehouse.errors import ResumeMismatch, SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.train.training_run import TrainingRun

_FILE = "lightning.ckpt"


class DlacDataModule(LightningDataModule):  # type: ignore[misc]  # lightning is not analyzed
    """The micro-batches of a run. `inputs` makes what `training_step` takes of one, by default the batch itself.

    The loss that `training_step` returns is weighed here, so that each sample counts once. A loss of `batch.mean(...)`, or one
    with `batch.weight`, is left as it is.
    """

    def __init__(self, run: TrainingRun, inputs: Callable[[Batch], Any] | None = None) -> None:
        super().__init__()
        self._run, self._inputs = run, inputs
        self._loader: RunLoader | None = None
        self._step: Callable[..., Any] | None = None
        """The model's own `training_step`, while it is fitted."""

    def setup(self, stage: str) -> None:
        """Let the loss of each micro-batch have its weight."""
        if stage == "fit":
            model = self.trainer.lightning_module
            self._step = model.training_step
            model.training_step = self._weighing(model.training_step)

    def teardown(self, stage: str) -> None:
        """Give the model its `training_step` back."""
        if stage == "fit" and self._step is not None:
            self.trainer.lightning_module.training_step, self._step = self._step, None

    def train_dataloader(self) -> RunLoader:
        """Return the loader, which cuts each batch into as many parts as the trainer accumulates."""
        self._loader = self._run.loader(self._inputs, micro_batches=self.trainer.accumulate_grad_batches)
        return self._loader

    def _weighing(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(training_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            found = training_step(*args, **kwargs)
            assert self._loader is not None, "Lightning asks for the loader before it trains"
            weight = self._loader.next_weight()
            if isinstance(found, Mapping):
                return {**found, "loss": weigh(found["loss"], weight)}
            return found if found is None else weigh(found, weight)

        return step


class DlacCheckpoint(Callback):  # type: ignore[misc]  # lightning is not analyzed
    """Checkpoints of a run whose files Lightning writes, after optimizer steps. The model optimizes automatically, with one."""

    def __init__(self, run: TrainingRun, model: LightningModule) -> None:
        """Restore the run. `path` then names Lightning's checkpoint to resume from. Raises as `TrainingRun.restore`."""
        super().__init__()
        self._run = run
        self._trainer: Any = None
        self._loss: torch.Tensor | float = 0.0
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        files = TrainerFiles(lambda folder: self._trainer.save_checkpoint(folder / _FILE), modules={"model": model})
        run.restore(files)
        self.path: str | None = None if files.folder is None else str(files.folder / _FILE)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise `SpecInvalid` if a setting keeps a run from being recorded exactly."""
        self._trainer = trainer
        if self._run.total_steps is None:
            raise SpecInvalid(
                "expected a run whose number of steps is known, found a packed or transformed one: Lightning then reads a batch "
                "before the step of the last one ends; set order.steps"
            )
        if not pl_module.automatic_optimization:
            raise SpecInvalid(
                "expected a model with automatic optimization, found a manual one: it hides the end of an optimizer step; "
                "train with run.batches() in a loop of your own"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that Lightning is at the step of the ledger, and let SIGTERM ask for a checkpoint again.

        Lightning's own handler of SIGTERM leaves the loop before all ranks have agreed on a last checkpoint.
        """
        if trainer.global_step != self._run.step:
            raise ResumeMismatch(
                f"expected Lightning to resume at step {self._run.step}, as the ledger has it, found it at step "
                f"{trainer.global_step}: call trainer.fit(..., ckpt_path=checkpoint.path) with the path of this callback"
            )
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record an optimizer step that has just ended."""
        micro_loss: torch.Tensor | None = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if micro_loss is None:
            raise SpecInvalid(
                "expected a loss from training_step, found None: a skipped batch would count as trained. Return a loss of zero"
            )
        self._loss = self._loss + micro_loss.detach()  # which Lightning has divided by the number of micro-batches
        if trainer.global_step == self._run.step:
            return
        loss, self._loss = self._loss, 0.0
        self._run.step_done(loss)
        self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin no other epoch if the request to stop came with the last checkpoint, which ends the loader."""
        self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the checkpoint that is due after the last step, as long as Lightning has its state."""
        self._run.finish_step()

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if self._run.stopped:
            trainer.should_stop = True
