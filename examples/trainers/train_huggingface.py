"""A Hugging Face Trainer: `torchrun --rdzv-backend dlac --nproc-per-node 2 train_huggingface.py`."""

import time

import torch
from transformers import Trainer, TrainingArguments

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers.huggingface import attach


class Network(torch.nn.Module):
    """A model as the Trainer wants it: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a micro-batch."""
        time.sleep(0.015)  # slow enough to be killed by hand
        return {"loss": torch.nn.functional.mse_loss(self.layers(x[:, None])[:, 0], y)}


def to_model(batch: dlac.Batch) -> dict[str, torch.Tensor]:
    """Return the arguments of the model."""
    return {"x": batch["x"], "y": batch["y"]}


with dlac.training_run("job.toml") as run:
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=run.total_steps,
        gradient_accumulation_steps=2,
        save_steps=50,  # each save is committed, beside those that the job spec asks for
        save_total_limit=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=Network(), args=arguments)
    trainer.train(resume_from_checkpoint=attach(trainer, run, to_model))
