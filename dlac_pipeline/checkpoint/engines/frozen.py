"""Frozen tensors: training leaves them as they are, as the base of an adapter. They go into a file that checkpoints share."""

from collections.abc import Iterable

from torch.nn import Module

from dlac_pipeline.checkpoint.stage.watch import Key, plain_tensors, storage_key

_LEAST_BYTES = 1 << 20
"""Fewer bytes are not worth a file of their own."""


def frozen_storages(modules: Iterable[object]) -> set[Key]:
    """Return the storages of the parameters that have no gradient, if they are large. Their content may change anyway."""
    parameters = [each for module in modules if isinstance(module, Module) for each in module.parameters()]
    trained = {storage_key(each) for each in plain_tensors([one for one in parameters if one.requires_grad])}
    frozen = {storage_key(each) for each in plain_tensors([one for one in parameters if not one.requires_grad])}
    found = frozen - trained - {(0, 0)}
    return found if sum(size for _, size in found) >= _LEAST_BYTES else set()
