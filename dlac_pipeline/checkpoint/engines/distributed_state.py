"""PyTorch state that ranks share out among them (FSDP2, DTensor) or repeat (DDP)."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Module
from torch.optim import Optimizer

from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.engines.shards import PlainLoadPlanner, PlainSavePlanner, ShardReader, ShardWriter
from dlac_pipeline.checkpoint.engines.torch_state import TorchState
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.lakehouse.errors import CheckpointError, DlacError


class DistributedState(Engine):
    """A model under FSDP2 (`fully_shard`), DDP, or neither.

    Every rank saves its part, replicas are saved once, any number of ranks loads it.

    Use `DistributedState(model=model, optimizer=optimizer, scheduler=scheduler)`. Other parts are equal on all ranks, as in
    `TorchState`.
    """

    name = "dcp"

    def __init__(self, *, model: Module, optimizer: Optimizer | Sequence[Optimizer] = (), **parts: Any) -> None:
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._rest = TorchState(**parts)

    def save(self, folder: Path, write: Write) -> None:
        """Every rank's parts and an index."""
        writer = ShardWriter(folder, write)
        with _together(folder) as alone:
            save(self._state(), storage_writer=writer, planner=PlainSavePlanner(), no_dist=alone)
        self._rest.save(folder, write)
        if writer.failure is not None:
            raise writer.failure

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load the parts that this rank has now, from whichever ranks saved them: tensors and plain values only."""
        state = self._state()
        reader = ShardReader(folder)
        with _together(folder) as alone:
            load(state, storage_reader=reader, planner=PlainLoadPlanner(), no_dist=alone)
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._rest.load(folder, saved_world_size=saved_world_size)

    def modules(self) -> Mapping[str, Any]:
        """Return the sharded model and the other parts."""
        return {"model": self._model, **self._rest.modules()}

    def _state(self) -> dict[str, Any]:
        """Return this rank's view, by names that do not depend on the number of ranks. Its tensors are those in use."""
        model, optimizer = get_state_dict(self._model, self._optimizers)
        return {"model": model, "optimizer": optimizer}


@contextmanager
def _together(folder: Path) -> Iterator[bool]:
    """Raise the failure of any rank at all ranks. Yield whether only one rank exists."""
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield alone
    except CheckpointException as err:
        rank, (cause, _) = min(err.failures.items())
        if isinstance(cause, DlacError):
            raise cause from err
        raise CheckpointError(
            f"expected the state of all ranks in {str(folder)!r} to be saved or loaded, rank {rank} found "
            f"{type(cause).__name__}: {cause}"
        ) from err
