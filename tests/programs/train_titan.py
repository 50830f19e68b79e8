"""A trainer with the loop of torchtitan 0.3, and its interfaces to a data loader and a checkpoint manager."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers.torchtitan import RunDataLoader, attach_run

IGNORE_INDEX = -100


class Optimizers:
    """torchtitan's container of an optimizer, whose state exists before its first step."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the names of parameters."""
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state."""
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Manager:
    """The part of torchtitan's checkpoint manager that its trainer calls."""

    interval = 500
    folder = "never-used"

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save with torch.distributed.checkpoint into a folder of the step."""
        if curr_step % self.interval and not last_step:
            return False
        save(self.states, checkpoint_id=Path(self.folder) / f"step-{curr_step}")
        return True

    def load(self, step: int = -1) -> bool:
        """Load the step's folder."""
        load(self.states, checkpoint_id=Path(self.folder) / f"step-{step}")
        return True

    def maybe_wait_for_staging(self) -> None:
        """Nothing is in flight."""

    maybe_wait_for_saving = close = maybe_wait_for_staging


class Validator:
    """torchtitan's validation, whose loader draws a seed."""

    def validate(self, model_parts: Sequence[torch.nn.Module], step: int) -> None:
        """Draw a number."""
        torch.rand(())


class TitanLike:
    """The loop of torchtitan's trainer, which validates after each tenth step."""

    def __init__(self, run: dlac.TrainingRun) -> None:
        self.step, self.steps = 0, run.total_steps
        network = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        self.model = DistributedDataParallel(network) if run.world_size > 1 else network
        self.model_parts = [self.model]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        config = RunDataLoader(run, lambda batch: ({"x": batch["x"][:, None]}, batch["y"]))
        self.dataloader = config.build(
            dp_world_size=run.world_size, dp_rank=run.rank, tokenizer=None, seq_len=1, local_batch_size=40
        )
        assert isinstance(self.dataloader, Stateful)
        optimizers = Optimizers(self.model, self.optimizer)
        states = {"model": network, "optimizer": optimizers, "train_state": self, "dataloader": self.dataloader}
        self.checkpointer: Any = Manager(states)
        self.validator = Validator()

    def train(self) -> None:
        """Train until the last step."""
        self.checkpointer.load(step=-1)
        batches = iter(self.dataloader)
        while self.step != self.steps:
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step, last_step=self.step == self.steps)
            if self.step % 10 == 0:
                self.validator.validate(self.model_parts, self.step)

    def train_step(self, batches: Iterator[Any]) -> None:
        """Accumulate the gradients of an optimizer step."""
        self.optimizer.zero_grad()
        parts = [next(batches) for _ in range(len(self.dataloader) // (self.steps or 1))]
        samples = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in parts]).sum()
        if dist.is_initialized():
            dist.all_reduce(samples)
        for inputs, labels in parts:
            self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=samples)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizer.step()
        time.sleep(0.03)

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's share of the loss."""
        losses = (self.model(input_dict["x"])[:, 0] - labels) ** 2
        loss: torch.Tensor = losses.where(labels != IGNORE_INDEX, 0.0).sum() / global_valid_tokens
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        (loss * ranks).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the step."""
        self.step = state["step"]


if __name__ == "__main__":
    with dlac.training_run("job.toml") as run:
        trainer = TitanLike(run)
        attach_run(trainer, run)
        trainer.train()
        trainer.checkpointer.close()
