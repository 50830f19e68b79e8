"""torchtitan, without importing it: the batches of a run as its data loader, and its checkpoints.

See docs/extensions/trainers.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlac_pipeline.extensions.trainers.run_loader import RunLoader
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.train.restored_state import RestoredGenerators
from dlac_pipeline.train.training_run import TrainingRun

_IGNORED = -100
"""torchtitan's IGNORE_INDEX: the label that its losses do not count."""


class RunDataLoader:
    """The configuration of torchtitan's data loader. `inputs` makes the pair (dict of inputs, labels) of a batch."""

    def __init__(
        self, run: TrainingRun, inputs: Callable[[Batch], tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        self._run, self._inputs = run, inputs

    def build(self, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **others: Any) -> RunLoader:
        """Return the loader. Raise `SpecInvalid` for another mesh, or if the local batch size does not divide a rank's."""
        run = self._run
        if (dp_rank, dp_world_size) != (run.coordinate.index, run.coordinate.count):
            raise SpecInvalid(
                f"expected this process at {run.coordinate.index} of {run.coordinate.count} in data parallelism, by launch.mesh, "
                f"found it at {dp_rank} of {dp_world_size}: set launch.mesh to torchtitan's tensor, pipeline and context degrees"
            )
        if run.spec.launch.mesh.pp > 2 and run.spec.read.stages == "ends":
            raise SpecInvalid(
                'expected read.stages = "all" with torchtitan, each of whose stages counts labels, found "ends": set it'
            )
        samples = run.spec.order.batch_size // run.coordinate.count
        if samples % local_batch_size:
            raise SpecInvalid(
                f"expected a local batch size that divides the {samples} samples of a rank's batch, found {local_batch_size}: "
                "change training.local_batch_size, or order.batch_size"
            )
        loader: RunLoader = run.loader(self._masked, micro_batches=samples // local_batch_size)
        return loader

    def _masked(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Make a micro-batch. torchtitan weighs it by its labels. It ignores all labels if the micro-batch has no sample."""
        inputs, labels = self._inputs(batch)
        return inputs, labels if batch.weight else torch.full_like(labels, _IGNORED)


def attach_run(trainer: Any, run: TrainingRun) -> None:
    """Let a built trainer of torchtitan commit its checkpoints. Call it before `trainer.train()`."""
    checkpointer = RunCheckpointer(trainer.checkpointer, run, modules=trainer.model_parts)
    trainer.checkpointer = checkpointer
    trainer.forward_backward_step = checkpointer.summing(trainer.forward_backward_step)
    validator = getattr(trainer, "validator", None)
    if validator is not None:
        validator.validate = _keeping_generators(validator.validate)


def _keeping_generators(validate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `validate` without an effect on the random generators.

    torchtitan validates after it has saved a step, and not again when it resumes from that step.
    """

    def validate_keeping(*args: Any, **kwargs: Any) -> Any:
        generators = RestoredGenerators()
        try:
            return validate(*args, **kwargs)
        finally:
            generators.reset()

    return validate_keeping


class RunCheckpointer:
    """torchtitan's checkpoint manager, which saves into the checkpoints of a run, when the job spec asks for them."""

    def __init__(self, manager: Any, run: TrainingRun, *, modules: list[torch.nn.Module]) -> None:
        self._manager, self._run = manager, run
        self._loss: torch.Tensor | float = 0.0
        self._loads = False
        manager.interval = 1  # it saves whenever it is asked
        named = {f"model{index or ''}": module for index, module in enumerate(modules)}
        self._files = TrainerFiles(self._save_files, self._load_files, modules=named)

    def summing(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return `forward_backward_step`, with its losses summed up here. Each is this rank's share of the global mean."""

        def summing_step(**arguments: Any) -> torch.Tensor:
            loss = step(**arguments)
            self._loss = self._loss + loss.detach()
            return loss

        return summing_step

    def load(self, step: int = -1) -> bool:
        """Load the checkpoint from which the run resumes. Return True if there is one. Raises as `TrainingRun.restore`."""
        self._run.restore(self._files)
        return self._loads

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Record the optimizer step that has just ended, and take a checkpoint if one is due, or after the last step."""
        run, before = self._run, self._run.head
        mesh = run.spec.launch.mesh
        loss, self._loss = self._loss * run.coordinate.count * mesh.cp, 0.0
        run.step_done(loss if mesh.is_last_stage(run.rank, run.world_size) else None)
        self._run.finish_step()  # torchtitan counts the next step before it asks for a batch
        if last_step:
            self._run.checkpoint()
        return self._run.head != before

    def maybe_wait_for_staging(self) -> None:
        """Wait until torchtitan's own copies are made."""
        self._manager.maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        """Wait for the checkpoint in progress."""
        self._run.settle()

    def close(self) -> None:
        """Release what torchtitan's manager uses."""
        self._manager.close()

    def _save_files(self, folder: Path) -> None:
        self._manager.folder = str(folder)
        self._manager.save(self._run.step)
        self._manager.maybe_wait_for_saving()

    def _load_files(self, folder: Path) -> None:
        self._manager.folder = str(folder)
        self._loads = self._manager.load(step=self._run.step)
