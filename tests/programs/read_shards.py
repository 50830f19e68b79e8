"""`read_shards.py FOLDER DUMP`: a rank that reads a checkpoint without DLAC, and dumps all tensors divided by rows."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.modules["dlac_pipeline"] = None  # type: ignore[assignment]  # every import of it raises


def main() -> None:
    """Load and dump."""
    folder, dump = sys.argv[1:]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    described: Any = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    state: dict[str, torch.Tensor] = {}
    for name, entry in described.items():
        whole = torch.zeros(entry.size, dtype=entry.properties.dtype)
        state[name] = distribute_tensor(whole, mesh, [Shard(0)]) if entry.size else whole
    load(state, storage_reader=HuggingFaceStorageReader(folder))
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
    if dist.get_rank() == 0:
        torch.save(found, dump)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
