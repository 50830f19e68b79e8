"""Layers of Megatron-core, split over ranks of tensor parallelism. The first one reads, and sends values to the others."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.rerun_state_machine import RerunDataIterator, initialize_rerun_state_machine
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers.megatron import RunIterator
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles


class Network(torch.nn.Module):
    """Two layers, the first split by columns, and the second by rows."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        torch.manual_seed(1)  # each rank makes the whole weights, and keeps its part
        start = torch.nn.init.xavier_normal_
        self.up = ColumnParallelLinear(4, 8, config=config, init_method=start, gather_output=False)
        self.down = RowParallelLinear(
            8, 1, config=config, init_method=start, bias=True, input_is_parallel=True, skip_bias_add=False
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return a number for each sample."""
        found: Tensor = self.down(torch.relu(self.up(features)[0]))[0]
        return found.squeeze(-1)


def values_of(batches: Any, group: dist.ProcessGroup) -> Tensor:
    """Return the features, and the factor of each sample's loss in the last column, from the first rank of tensor parallelism."""
    found: list[Any] = [next(batches) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(found, group_src=0, group=group)
    values: Tensor = found[0]
    return values


def to_model(batch: dlac.Batch) -> Tensor:
    """Return the values of a micro-batch."""
    factor = batch.valid * (batch.weight / max(1, int(batch.valid.sum())))
    return torch.cat([batch["x"].float(), factor[:, None]], dim=1)


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        tensors = run.spec.launch.mesh.tp
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensors)
        initialize_rerun_state_machine()
        group, data = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        assert place == (run.coordinate.index, run.coordinate.count), "the ranks are numbered as Megatron numbers them"
        model = Network(ModelParallelConfig(tensor_model_parallel_size=tensors, use_cpu_initialization=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        file = f"mp_rank_{dist.get_rank(group):02d}.pt"

        def save(folder: Path) -> None:
            if run.coordinate.index == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / file)

        def load(folder: Path) -> None:
            found = torch.load(folder / file, weights_only=False)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])

        run.restore(TrainerFiles(save, load, modules={}))
        own = RunIterator(run, to_model, micro_batch_size=2)
        batches = RerunDataIterator(own)
        while not own.is_over:
            batch: Any = run._batch
            total = torch.zeros(())
            optimizer.zero_grad()
            for _ in range(own.num_microbatches):
                values = values_of(batches, group)
                features, factor = values[:, :4], values[:, 4]
                loss = ((model(features) - features.sum(-1)) ** 2 * factor).sum() / own.num_microbatches
                loss.backward()
                total += loss.detach()
            for grad in (each.grad for each in model.parameters() if each.grad is not None):
                dist.all_reduce(grad, group=data)
                grad.div_(run.coordinate.count)
            optimizer.step()
            train_tiny.write_entry(run, batch, total)
            own.step_done(total)


if __name__ == "__main__":
    main()
