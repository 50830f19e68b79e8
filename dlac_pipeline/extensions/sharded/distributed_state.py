"""PyTorch state that ranks share out among them (FSDP2, DTensor) or repeat (DDP)."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.engines.engine import Engine, Weights
from dlac_pipeline.checkpoint.engines.exact_load import load_exactly
from dlac_pipeline.checkpoint.engines.rank_buffers import load_buffers, save_buffers
from dlac_pipeline.checkpoint.engines.torch_state import TorchState, reshard
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.checkpoint.stage.watch import frozen_storages
from dlac_pipeline.extensions.sharded.optimizer_states import OptimizerStates
from dlac_pipeline.extensions.sharded.shards import (
    Layout,
    PlainLoadPlanner,
    PlainSavePlanner,
    ShardReader,
    ShardWriter,
    whole_tensors,
)
from dlac_pipeline.extensions.sharded.stages import check_stage_names
from dlac_pipeline.lakehouse.errors import CheckpointError, DlacError


class DistributedState(Engine):
    """A model that ranks share out among them in any way: each part is saved once, and ranks of any mesh load it.

    Use `DistributedState(model=model, optimizer=optimizer, scheduler=scheduler)`. A stage of a pipeline is a model, or a list of
    such parts, whose parameters have the names that they have in the whole model. Other parts are equal on all ranks, as in
    `TorchState`.
    """

    name = "dcp"

    def __init__(
        self, *, model: Module | Sequence[Module], optimizer: Optimizer | Sequence[Optimizer] = (), **parts: Any
    ) -> None:
        """Raise `ScriptInvalid` if an optimizer has a parameter that the model does not have, or two parts have one."""
        self._models = [model] if isinstance(model, Module) else list(model)
        for each in self._models:
            reshard(each)
        self._own = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._optimizers = OptimizerStates(self._models, self._own, self._share)
        self._optimizers.check()
        self._rest = TorchState(**parts)
        self._layout: Layout | None = None
        """Layout of the last save, at all ranks or at none. A plan takes DCP as long as a copy."""
        self._tree: RankTree | None = None

    def take_ranks(self, tree: RankTree, *, lists: bool) -> None:
        """Receive the ranks that save together."""
        self._tree = tree

    def check_stages(self, tree: RankTree, *, stage: int) -> None:
        """Raise as `check_stage_names`."""
        check_stage_names(self._models, tree, stage=stage)

    def save(self, folder: Path, write: Write) -> None:
        """Every rank's parts and an index."""
        writer = ShardWriter(folder, write, frozen=frozen_storages(self._models))
        planner, last = PlainSavePlanner(), self._layout
        self._layout = None
        with _together(folder) as alone:
            state = {
                "model": _with_whole_values(self._model_state()),
                "optimizer": self._optimizers.state(),
            }
            if self._agree(writer.fits(last, planner, state)):
                writer.repeat()
            else:
                save(state, storage_writer=writer, planner=planner, no_dist=alone)
        if alone or self._tree is not None:
            self._layout = writer.layout
        save_buffers(folder, self._named_models(), write)
        self._rest.save(folder, write)
        if writer.failure is not None:
            raise writer.failure

    @staticmethod
    def write_adopted(state: Mapping[str, Any], folder: Path, write: Write) -> None:
        """Write parts that another program saved, which may lack parts that a script has."""
        writer = ShardWriter(folder, write, adopted=True)
        save(dict(state), storage_writer=writer, planner=PlainSavePlanner(), no_dist=True)
        if writer.failure is not None:
            raise writer.failure

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load the parts that this rank has now, from any ranks that saved them: tensors and plain values only."""
        reader = ShardReader(folder)
        model = self._model_state()
        values = set(reader.index["values"])
        wanted = {
            name: None if f"model.{name}" in values else value for name, value in _without_tied(model, reader).items()
        }
        state = {"model": wanted, **self._optimizers.targets(reader)}
        with _together(folder) as alone:
            load(state, storage_reader=reader, planner=PlainLoadPlanner(), no_dist=alone)
        found = state.pop("model")
        if not reader.is_adopted:
            found = {name: value[0] if isinstance(value, tuple) else value for name, value in found.items()}
        for part in self._models:
            mine = get_model_state_dict(part)
            whole = {
                **mine,
                **(found if len(self._models) == 1 else {name: found[name] for name in mine if name in found}),
            }
            load_exactly(part, whole, set_state=partial(set_model_state_dict, part))
        self._optimizers.load(reader, state)
        load_buffers(folder, self._named_models(), saved_world_size=saved_world_size)
        rest = self._rest
        if reader.is_adopted:
            parts = TorchState.parts_in(folder)
            rest = TorchState(**{name: part for name, part in rest.modules().items() if name in parts})
        rest.load(folder, saved_world_size=saved_world_size)

    @classmethod
    def weights_in(cls, folder: Path, part: str) -> Weights:
        """Return the tensors of a part, put together. Raise `CheckpointError` if it does not exist."""
        found = whole_tensors(folder, part)
        if not found:
            raise CheckpointError(
                f"expected a part named {part!r} in the checkpoint, found none: its weights are 'model'"
            )
        return found

    @classmethod
    def optimizer_in(cls, folder: Path, model: Weights, scratch: Path) -> Weights:
        """Return the optimizer's tensors, put together. Raise `CheckpointError` for values that are no tensors."""
        # The script has the optimizer's settings.
        names = ShardReader(folder).index["values"]
        values = [name for name in names if not name.startswith("optimizer.param_groups.")]
        if values:
            raise CheckpointError(
                f"expected tensors only in the state of model and optimizer, found {len(values)} plain values, such as "
                f"{values[0]!r}, which safetensors cannot contain: export its weights with dlac checkpoint export"
            )
        return whole_tensors(folder, "optimizer")

    def _named_models(self) -> dict[str, Module]:
        """Return the model, or its parts by number after the first one."""
        return {f"model-{number}" if number else "model": each for number, each in enumerate(self._models)}

    def _model_state(self) -> dict[str, Any]:
        """Return the state of all parts. They may have the same buffers."""
        return {name: each for part in reversed(self._models) for name, each in get_model_state_dict(part).items()}

    def _share(self, own: bytes) -> list[bytes]:
        """Return what all ranks say, each once, in the order of the ranks. Collective."""
        tree = self._tree
        if tree is None or self._agree(tree.broadcast(blake3(own).digest()) == blake3(own).digest()):
            return [own]
        gathered = tree.gather(own)
        found = tree.broadcast(None if gathered is None else msgpack.packb([*dict.fromkeys(gathered)]))
        return list(msgpack.unpackb(found))

    def _agree(self, is_right: bool) -> bool:
        """Return whether something is right at all ranks. Collective."""
        return not self._tree.broadcast(self._tree.lowest(b"" if is_right else b"-")) if self._tree else is_right

    def modules(self) -> Mapping[str, Any]:
        """Return the sharded model and all further parts."""
        return {**self._named_models(), **self._rest.modules()}

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the sharded model, and further parts that are some."""
        return [*self._own, *self._rest.optimizers()]


def _with_whole_values(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state in which DCP takes an extra state for one value. A load would look for the keys of a new model."""
    return {name: (value,) if isinstance(value, Mapping | list | tuple) else value for name, value in model.items()}


def _without_tied(model: dict[str, Any], reader: ShardReader) -> dict[str, Any]:
    """Leave out tensors that an adopted checkpoint has under another name."""
    found = {_address(value) for name, value in model.items() if not reader.lacks(f"model.{name}")}
    return {
        name: value
        for name, value in model.items()
        if not reader.lacks(f"model.{name}") or _address(value) not in found
    }


def _address(value: Any) -> int:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() if isinstance(local, torch.Tensor) else id(local)


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
