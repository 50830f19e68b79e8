"""torchtitan's own trainer, with its meshes, optimizers, schedules and checkpoints, on the batches of a run.

Its attention has no backward pass on CPU, so the loss is that of the embedding and the output layer alone.
"""

from types import SimpleNamespace
from typing import Any

import torch
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torchtitan.tools import utils

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers.torchtitan import RunDataLoader, attach_run


def to_model(batch: dlac.Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs and labels of a micro-batch."""
    tokens = batch["tokens"].long()
    return {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()


def make_trainer(run: dlac.TrainingRun, folder: str) -> Any:
    """Build the trainer on the run's mesh."""
    utils.device_type, utils.device_module = "cpu", torch.cpu
    # not before: they take the device by name
    from torchtitan.components import metrics
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    nothing = metrics.DeviceMemStats._make([0] * len(metrics.DeviceMemStats._fields))
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
    )
    distributed.set_pg_timeouts = lambda **_: None  # its barrier wants a device
    config = llama3_debugmodel()
    config.dump_folder, config.dataloader = folder, RunDataLoader(run, to_model)
    config.tokenizer = SimpleNamespace(build=lambda **_: None)
    config.loss = CrossEntropyLoss.Config()
    config.validator.enable = config.metrics.enable_tensorboard = False
    config.activation_checkpoint = activation_checkpoint.FullAC.Config()
    config.checkpoint.enable = True
    training, parallelism, mesh = config.training, config.parallelism, run.spec.launch.mesh
    training.steps, training.seq_len, training.local_batch_size = run.total_steps, 16, 4
    training.global_batch_size = run.spec.order.batch_size
    parallelism.tensor_parallel_degree, parallelism.spmd_backend = mesh.tp, "partial_dtensor"
    return config.build()


def whole(weight: torch.Tensor) -> torch.Tensor:
    """Return all of a weight. Its gradient is the sum over the ranks that have other samples."""
    if not isinstance(weight, DTensor):
        return weight
    names = weight.device_mesh.mesh_dim_names or ()
    return weight.full_tensor(grad_placements=[Replicate() if name == "tp" else Partial() for name in names])


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        trainer = make_trainer(run, run.spec.params["journal"])

        def step(*, input_dict: Any, labels: torch.Tensor, global_valid_tokens: torch.Tensor) -> torch.Tensor:
            model = trainer.model_parts[0]
            weight, head = (whole(each.weight) for each in (model.tok_embeddings, model.lm_head))
            logits = functional.embedding(input_dict["input"], weight) @ head.T
            flat = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss: torch.Tensor = flat / global_valid_tokens
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for each in model.parameters():  # its checkpoints want a state of every weight
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            return loss

        record = dlac.TrainingRun.record_step

        def recorded(run: Any, loss: Any, *, applied: bool | None = None) -> bool:
            train_tiny.write_entry(run, run._batch, loss)
            return record(run, loss, applied=applied)

        setattr(dlac.TrainingRun, "record_step", recorded)  # noqa: B010 - the trainer has no journal
        trainer.forward_backward_step = step
        attach_run(trainer, run)
        trainer.train()


if __name__ == "__main__":
    main()
