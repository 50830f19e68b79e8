"""Names and places of the shards that torch.distributed.checkpoint (DCP) loads. They import no DCP."""

import json
from collections.abc import Mapping, Sequence

INDEX = "shards-index.pt"
"""File in each checkpoint of the engine "dcp"."""


def tensor_file(rank: int) -> str:
    """Return the name of a rank's file of tensors, as DCP's `HuggingFaceStorageWriter` numbers them."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def sharding_info(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the texts by which DCP places the tensors of a safetensors file in tensors of the whole state."""
    places = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    return {"DCP_SHARDING_INFO": json.dumps(places, separators=(",", ":")), "DCP_VERSION": "1.0", "format": "pt"}


def box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a part of a tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
