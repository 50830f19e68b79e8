"""Two ranks with models of several kinds of parallelism, and the verdict of the check of data parallelism on each, as JSON."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.data_parallel import check_layout, check_weights_agree
from dlac_pipeline.checkpoint.engines import Engine
from dlac_pipeline.extensions.sharded.distributed_state import DistributedState
from dlac_pipeline.lakehouse.errors import ScriptInvalid
from dlac_pipeline.spec.mesh_spec import DATA_PARALLEL, MeshSpec

RANK = int(os.environ["RANK"])


def network(seed: int = 0) -> torch.nn.Sequential:
    """Return a model with initial weights."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))


def sharded(mesh: DeviceMesh | None = None) -> Engine:
    """Return a model under FSDP2."""
    model = network()
    fully_shard(model, mesh=mesh)
    return DistributedState(model=model)


def split() -> Engine:
    """Return a model whose layers are split over the ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return DistributedState(model=parallelize_module(network(), mesh, plan))


def averaged() -> Engine:
    """Return replicas. Rank 0 has an average of the weights too."""
    more = {"average": network()} if RANK == 0 else {}
    return dlac.TorchState(model=DistributedDataParallel(network()), **more)


def whole(model: torch.nn.Module) -> Engine:
    """Return sharded parameters in the engine of whole ones."""
    fully_shard(model)
    return dlac.TorchState(model=model)


def staged() -> Engine:
    """Return a model beside a mesh of stages."""
    KEPT.append(init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)))
    return dlac.TorchState(model=network())


KEPT: list[object] = []
MODELS: dict[str, Callable[[], Engine]] = {
    "replicas": averaged,
    "shards": sharded,
    "groups of shards": lambda: sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))),
    "other weights": lambda: dlac.TorchState(model=network(RANK)),
    "stages": lambda: dlac.TorchState(model=torch.nn.ModuleDict({f"stage{RANK}": network()})),
    "other shapes": lambda: dlac.TorchState(model=torch.nn.Linear(2 + RANK, 2)),
    "shards in TorchState": lambda: whole(network()),
    "one name at two stages": lambda: DistributedState(model=network(RANK)),
    "half of the ranks": lambda: sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]),
    "tensor parallel": split,
    "tensor parallel in the spec": split,
    "stages in a mesh": staged,
}
"""Those with names in a mesh are last: their meshes stay alive."""
MESHES = {
    "one name at two stages": MeshSpec(pp=2),
    "tensor parallel in the spec": MeshSpec(tp=2),
    "stages in a mesh": MeshSpec(tp=2),
}


def main() -> None:
    """Check each model."""
    dist.init_process_group("gloo")
    tree = RankTree(RANK, 2, dist.new_group(backend="gloo"))
    found = {}
    for name, make in MODELS.items():
        engine = make()
        try:
            check_layout(engine, tree, MESHES.get(name, DATA_PARALLEL))
            check_weights_agree(engine, tree, MESHES.get(name, DATA_PARALLEL))
            found[name] = ""
        except ScriptInvalid as err:
            found[name] = str(err)
    Path(os.environ["OUT"], f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
