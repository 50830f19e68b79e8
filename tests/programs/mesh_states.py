"""Four ranks that save a GPT with tied weights on each mesh, and load it on each other one. Rank 0 writes what differs."""

import json
import os
import zlib
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.extensions.sharded.distributed_state import DistributedState
from examples.mesh.train import Gpt, split

MESHES = {
    "data": (4, 1, 1, 1),
    "data and tensors": (2, 2, 1, 1),
    "tensors": (1, 4, 1, 1),
    "stages": (2, 1, 2, 1),
    "interleaved stages": (2, 1, 2, 2),
    "tensors and stages": (1, 2, 2, 1),
}
"""Sizes of data parallelism, tensor parallelism and the pipeline, and stages of a rank."""
TIED = {"head.weight": "embedding.weight"}


class Placed:
    """The stages of this rank on a mesh, with their optimizer."""

    def __init__(self, name: str, tree: RankTree, *, fill: float = 0.0) -> None:
        """`fill` replaces all weights, to show what a load leaves unchanged."""
        data, tensors, pipeline, parts = MESHES[name]
        mesh = init_device_mesh("cpu", (pipeline, data, tensors), mesh_dim_names=("pp", "dp", "tp"))
        first = mesh["pp"].get_local_rank()
        self.models = [Gpt(4, 32, 24, stage=first + more * pipeline, stages=pipeline * parts) for more in range(parts)]
        for model in self.models:
            if model.head is not None and model.embedding is not None:
                model.head.weight = model.embedding.weight
            elif model.head is not None:  # as if ranks had sent it to each other
                whole = Gpt(4, 32, 24).embedding
                assert whole is not None
                model.head.weight.data.copy_(whole.weight.data)
            if fill:
                for each in model.parameters():
                    each.data.fill_(fill)
            split(model, mesh)
        self.optimizer = torch.optim.AdamW((each for model in self.models for each in model.parameters()), lr=0.01)
        self.engine = DistributedState(model=self.models, optimizer=self.optimizer)
        self.engine.take_ranks(tree, lists=True)

    def step(self) -> None:
        """Make an optimizer step."""
        for name, each in self._parameters():
            seed = zlib.crc32(TIED.get(name, name).encode()) % 100
            grad: Tensor = torch.sin(torch.arange(each.numel(), dtype=torch.float32) + seed).reshape(each.shape)
            if isinstance(each, DTensor):
                grad = distribute_tensor(grad, each.device_mesh, each.placements)
            each.grad = grad
        self.optimizer.step()

    def whole(self) -> dict[str, Tensor]:
        """Return all tensors of this rank's stages and their optimizer states, put together. Collective."""
        found: dict[str, Tensor] = {}
        for name, each in self._parameters():
            found[name] = _full(each)
            found |= {f"{name}.{key}": _full(value) for key, value in self.optimizer.state[each].items()}
        return found

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model in self.models:
            yield from model.named_parameters()


def _full(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def main() -> None:
    """Save on each mesh, load on each other one, and compare."""
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(os.environ["OUT"])
    tree = RankTree(rank, 4, dist.new_group(backend="gloo"))
    saved: dict[str, dict[str, Tensor]] = {}
    for name in MESHES:
        placed = Placed(name, tree)
        for _ in range(2):
            placed.step()
        (folder / name).mkdir(exist_ok=True)
        dist.barrier()
        placed.engine.save(folder / name, Direct().write)
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, placed.whole())
        saved[name] = {key: each for one in found for key, each in one.items()}
        dist.barrier()
    expected = dict(saved["data"])
    for other_name, name in TIED.items():
        tied = {key: each for key, each in expected.items() if key.startswith(name)}
        expected |= {key.replace(name, other_name): each for key, each in tied.items()}
    other: list[str] = []
    for name, state in saved.items():
        other += [f"{name}: {key}" for key, each in state.items() if not torch.equal(each, expected[key])]
    for one, two in permutations(MESHES, 2):
        placed = Placed(two, tree, fill=7.0)
        placed.engine.load(folder / one, saved_world_size=4)
        for key, each in placed.whole().items():
            if key not in expected or not torch.equal(each, expected[key]):
                other.append(f"{one} on {two}: {key} of rank {rank}")
        states = len(placed.optimizer.state)
        if states != len({each for _, each in placed._parameters()}):
            other.append(f"{one} on {two}: {states} states")
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, other)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps([each for one in every for each in one]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
