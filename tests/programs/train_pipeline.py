"""A small model in the stages of DeepSpeed's PipelineEngine, with ZeRO 1. Params: `micro_batches` (2)."""

from typing import Any

import deepspeed
import torch
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

import dlac_pipeline as dlac
from dlac_pipeline.extensions.deepspeed.pipeline import pipeline_batches


def loss_of(found: Tensor, labels: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the mean over the valid samples, times the weight of the micro-batch."""
    wanted, valid, weight = labels
    errors = (found.squeeze(-1) - wanted) ** 2
    return torch.where(valid, errors, 0.0).sum() / valid.sum().clamp(min=1) * weight


def to_model(batch: dlac.Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return inputs and labels of a micro-batch."""
    features = batch["x"].float()
    return features, (features.sum(-1), batch.valid, torch.tensor(batch.weight))


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        parts = int(run.spec.params.get("micro_batches", "2"))
        deepspeed.init_distributed("gloo")
        layers = [LayerSpec(torch.nn.Linear, width, 8) for width in (4, *[8] * 7)]
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = PipelineModule(
                [*layers, LayerSpec(torch.nn.Linear, 8, 1)],
                num_stages=run.spec.launch.mesh.pp,
                loss_fn=loss_of,
                partition_method="uniform",
                base_seed=1,
                seed_layers=True,
            )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": run.spec.order.batch_size // run.coordinate.count // parts,
            "gradient_accumulation_steps": parts,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "steps_per_print": 1_000_000,
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        run.restore(engine)
        for micro_batches in pipeline_batches(run, engine, to_model):
            loss = engine.train_batch(micro_batches)
            batch: Any = run._batch
            rows = batch["row_id"][batch.valid].tolist() if batch.tensors else []
            train_tiny.write_entry(run, batch, loss, rows)
            run.step_done(loss)


if __name__ == "__main__":
    main()
