"""A linear model trained by param `trainer` in `micro_batches`, on a short last batch. Its `weights` are written."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import dlac_pipeline as dlac

LR = 0.1


class Network(torch.nn.Module):
    """A model that returns its mean loss, and notes whether it was given a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.zeros = 0

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample."""
        self.zeros += int((x == 0).all(-1).sum())
        losses: torch.Tensor = (self.layer(x)[:, 0] - y) ** 2
        return losses

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss."""
        return {"loss": self.losses(x, y).mean()}


class Classifier(Network):
    """A model with labels, which divides the sum of their losses by the number that the Trainer counted."""

    def forward(  # type: ignore[override]  # its labels have the Trainer's name
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the sum of the losses, divided by the number of labels."""
        losses = self.losses(x, labels.float()).where(labels != -100, 0.0)
        return {"loss": losses.sum() / num_items_in_batch}


def features(batch: dlac.Batch) -> torch.Tensor:
    """Return the inputs of the model."""
    return batch["x"].to(torch.float32)


def to_model(batch: dlac.Batch) -> dict[str, torch.Tensor]:
    """Return the arguments of the model."""
    return {"x": features(batch), "y": targets(batch)}


def to_classifier(batch: dlac.Batch) -> dict[str, torch.Tensor]:
    """Return the arguments of the model with labels."""
    return {"x": features(batch), "labels": batch["even"].long()}


def targets(batch: dlac.Batch) -> torch.Tensor:
    """Return the values to learn."""
    return batch["even"].to(torch.float32)


def train_plain(run: dlac.TrainingRun, model: Network, parts: int) -> None:
    """Train in a plain loop."""
    wrapped = DistributedDataParallel(model.layer) if run.world_size > 1 else model.layer
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    run.restore(model=model, optimizer=optimizer)
    for batch in run.batches():
        loss = batch.mean((wrapped(features(batch))[:, 0] - targets(batch)) ** 2)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        run.step_done(loss)


def train_huggingface(
    run: dlac.TrainingRun, model: torch.nn.Module, parts: int, *callbacks: Any, **changes: Any
) -> str | None:
    """Train with a Hugging Face Trainer, and return the folder from which it resumed. `changes` are arguments of it."""
    from transformers import Trainer, TrainingArguments

    from dlac_pipeline.extensions.trainers.huggingface import attach

    arguments: dict[str, Any] = {
        "output_dir": f"{run.spec.params.get('weights')}.out",
        **{"max_steps": run.total_steps, "gradient_accumulation_steps": parts, "save_steps": 1000, "use_cpu": True},
        **{"optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        **{"report_to": [], "disable_tqdm": True},
    }
    trainer = Trainer(model=model, args=TrainingArguments(**{**arguments, **changes}), callbacks=list(callbacks))
    folder = attach(trainer, run, to_classifier if isinstance(model, Classifier) else to_model)
    trainer.train(resume_from_checkpoint=folder)
    return folder


def train_accelerate(run: dlac.TrainingRun, network: Network, parts: int) -> None:
    """Train in a loop over Accelerate."""
    from accelerate import Accelerator

    from dlac_pipeline.extensions.trainers.accelerate import accelerator_files

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=LR))
    run.restore(accelerator_files(accelerator, model))
    total = torch.tensor(0.0)
    for batch in run.loader(micro_batches=parts):
        with accelerator.accumulate(model):
            loss = model(features(batch), targets(batch))["loss"]
            loss = torch.where(batch.valid.any(), loss * batch.weight, 0.0)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / parts
        if accelerator.sync_gradients:
            run.step_done(total)
            total = torch.tensor(0.0)


def train_lightning(
    run: dlac.TrainingRun,
    model: torch.nn.Module,
    parts: int,
    inputs: Callable[[dlac.Batch], Any] = to_model,
    at_step: Callable[[int], None] = lambda step: None,
    validation: Any = None,
) -> None:
    """Train with Lightning. A function is called in each step. A loader for validation is read every five steps."""
    from lightning.pytorch import LightningModule, Trainer

    from dlac_pipeline.extensions.trainers.lightning import DlacCheckpoint, DlacDataModule

    class Module(LightningModule):  # type: ignore[misc]  # lightning is not analyzed
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
            at_step(self.trainer.global_step)
            return self.network(**batch)

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            torch.rand(len(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, data = Module(), DlacDataModule(run, inputs)
    if validation is not None:
        data.val_dataloader = lambda: validation
    checkpoints = DlacCheckpoint(run, module)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp" if run.world_size > 1 else "auto",
        devices=run.world_size,
        max_steps=run.total_steps or -1,
        val_check_interval=None if validation is None else 5,
        accumulate_grad_batches=parts,
        callbacks=[checkpoints],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoints.path)


TRAINERS: dict[str, Callable[..., Any]] = {
    "plain": train_plain,
    "huggingface": train_huggingface,
    "labels": train_huggingface,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
}


def train(run: dlac.TrainingRun) -> None:
    """Train with the trainer of the params, and write the weights."""
    params = run.spec.params
    torch.manual_seed(0)
    model = Classifier() if params["trainer"] == "labels" else Network()
    TRAINERS[params["trainer"]](run, model, int(params["micro_batches"]))
    if run.rank == 0:
        torch.save({**model.state_dict(), "zeros": torch.tensor(model.zeros)}, params["weights"])


if __name__ == "__main__":
    with dlac.training_run() as run:
        train(run)
