"""Names of tensors at the stages of a pipeline: a checkpoint has one tensor of each name."""

from collections.abc import Sequence

import msgpack
import torch
from blake3 import blake3
from torch.distributed.tensor import DTensor
from torch.nn import Module

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.lakehouse.errors import ScriptInvalid


def check_stage_names(models: Sequence[Module], tree: RankTree, *, stage: int) -> None:
    """Raise `ScriptInvalid` at all ranks if stages have other weights of one name. A tied tensor is equal to the last bit.

    `models` are the parts of this rank, after a step: before it, stages that begin with one seed may be equal. Collective.
    """
    mine = {name: each for model in models for name, each in model.named_parameters()}
    gathered = tree.gather(msgpack.packb([stage, [*mine]]))
    stages: dict[str, set[int]] = {}
    for number, names in map(msgpack.unpackb, gathered or []):
        for name in names:
            stages.setdefault(name, set()).add(number)
    common = sorted(name for name, found in stages.items() if len(found) > 1)
    names = msgpack.unpackb(tree.broadcast(None if gathered is None else msgpack.packb(common)))
    digests = {name: _digest(mine[name].detach()) for name in names if name in mine}
    gathered = tree.gather(msgpack.packb([stage, digests]))
    with failing_together(tree, doing="comparing the stages"):
        known: dict[str, tuple[int, bytes]] = {}
        for number, found in map(msgpack.unpackb, gathered or []):
            for name, digest in found.items():
                first, expected = known.setdefault(name, (number, digest))
                if digest != expected:
                    raise ScriptInvalid(
                        f"expected {name!r} to be one tensor, found other values of it at the stages {first} and {number}: give "
                        "parameters the names that they have in the whole model, such as blocks.0 at the first stage and "
                        "blocks.1 at the next one"
                    )


def _digest(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor that ranks may share out. Collective over them."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return blake3(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
