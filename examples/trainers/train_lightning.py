"""A Lightning Trainer: `torchrun --rdzv-backend dlac --nproc-per-node 2 train_lightning.py`."""

import time

import torch
from lightning.pytorch import LightningModule, Trainer

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers.lightning import DlacCheckpoint, DlacDataModule


class Network(LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        time.sleep(0.015)  # slow enough to be killed by hand
        return torch.nn.functional.mse_loss(self.layers(batch["x"][:, None])[:, 0], batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


with dlac.training_run("job.toml") as run:
    model = Network()
    data = DlacDataModule(run, lambda batch: {"x": batch["x"], "y": batch["y"]})
    checkpoints = DlacCheckpoint(run, model)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp" if run.world_size > 1 else "auto",
        devices=run.world_size,
        max_steps=run.total_steps,
        accumulate_grad_batches=2,
        callbacks=[checkpoints],
        enable_checkpointing=False,  # DlacCheckpoint makes them
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(model, datamodule=data, ckpt_path=checkpoints.path)
