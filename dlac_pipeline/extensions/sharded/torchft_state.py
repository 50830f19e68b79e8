"""PyTorch state of a replica group, whose peers have the same state. The ranks of a group may share it out among them (FSDP2)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlac_pipeline.checkpoint.engines import Engine, adapt
from dlac_pipeline.checkpoint.engines.exact_load import load_exactly
from dlac_pipeline.checkpoint.engines.torch_state import is_sharded
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.lakehouse.errors import ScriptInvalid

Reduce = Callable[[list[torch.Tensor], torch.Tensor], bool]
"""(gradients, loss) -> True if the step commits. The gradients are then their mean over the groups present."""
_SHARD = "dlac.shard"
"""Key of a rank's part of a sharded tensor, in the state for a peer."""


class TorchFTState(Engine):
    """State of a replica group: `TorchFTState(model=model, optimizer=optimizer)`.

    The model is the bare module, or with `launch.ranks_per_replica` one that `fully_shard` has sharded. Checkpoints are
    written as by `TorchState` or `DistributedState`. A newcomer gets all parts from a peer, so each part has `state_dict` and
    `load_state_dict`, and the parts that are modules have the parameters that are trained.
    """

    def __init__(self, **parts: Any) -> None:
        self._saved = adapt(None, **parts)
        self.name = self._saved.name
        self._parts = dict(_flat(parts))
        self._reduce: Reduce | None = None
        self._is_checked = False

    def join(self, reduce: Reduce) -> None:
        """Reduce with the groups of a run from now on. Raise `ScriptInvalid` for a part that a newcomer could not load."""
        for name, part in self._parts.items():
            if not isinstance(part, torch.nn.Module | torch.optim.Optimizer) and is_sharded(part.state_dict()):
                raise ScriptInvalid(
                    f"expected sharded tensors in modules and optimizers only, found some in {name!r}: keep whole tensors in it"
                )
        self._reduce = reduce

    def reduce(self, loss: torch.Tensor) -> bool:
        """Average the gradients over the groups present. Return True if the step commits: then call `optimizer.step()`.

        `loss` is `batch.mean(...)`. A step that does not commit is not applied: its batch is read again. Without replica
        groups every step commits. A parameter without a gradient gets zeros, because a peer may have one.

        Raises:
            ScriptInvalid: nothing averages the gradients of a parameter over the ranks of a process group, or this is the
                second call for a batch.
        """
        if not self._is_checked:
            _check_averaged(self._parts)
            self._is_checked = True
        if self._reduce is None:
            return True
        gradients = []
        for part in self._parts.values():
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    gradients.append(_local(parameter.grad))
        return self._reduce(gradients, loss)

    def save(self, folder: Path, write: Write) -> None:
        """Save as the engine of a run without groups does."""
        self._saved.save(folder, write)

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load what such an engine has saved."""
        self._saved.load(folder, saved_world_size=saved_world_size)

    def modules(self) -> Mapping[str, Any]:
        """Return the parts."""
        return self._saved.modules()

    def optimizers(self) -> Sequence[Any]:
        """Return the optimizers."""
        return self._saved.optimizers()

    def peer_state(self) -> dict[str, Any]:
        """Return this rank's state of all parts, for a peer."""
        return {name: _without_mesh(part.state_dict()) for name, part in self._parts.items()}

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Load what `peer_state` of the same rank of a peer returned."""
        for name, part in self._parts.items():
            given = state[name]
            if isinstance(part, torch.nn.Module):
                own = part.state_dict()
                given = {key: _with_mesh(value, _mesh_of(own.get(key))) for key, value in given.items()}
            elif isinstance(part, torch.optim.Optimizer):
                load_exactly(part, {**given, "state": _optimizer_state(part, given)}, {})
                continue
            part.load_state_dict(given)


def _flat(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts by name. A list, as of optimizers, has one for each of its items."""
    for name, part in parts.items():
        if isinstance(part, list | tuple):
            yield from ((f"{name}.{index}", each) for index, each in enumerate(part))
        else:
            yield name, part


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _without_mesh(value: Any) -> Any:
    """Replace sharded tensors by this rank's parts of them. Those of a peer are on other ranks."""
    if isinstance(value, DTensor):
        return {
            _SHARD: _local(value),
            "shape": tuple(value.shape),
            "stride": value.stride(),
            "placements": value.placements,
        }
    if isinstance(value, dict):
        return {key: _without_mesh(each) for key, each in value.items()}
    return [_without_mesh(each) for each in value] if isinstance(value, list) else value


def _with_mesh(value: Any, mesh: Any) -> Any:
    """Put the sharded tensors of a peer onto the mesh of this rank's group."""
    if isinstance(value, list):
        return [_with_mesh(each, mesh) for each in value]
    if not isinstance(value, dict):
        return value
    if _SHARD not in value:
        return {key: _with_mesh(each, mesh) for key, each in value.items()}
    shape, stride, placements = torch.Size(value["shape"]), value["stride"], value["placements"]
    return DTensor.from_local(value[_SHARD], mesh, placements, run_check=False, shape=shape, stride=stride)


def _mesh_of(tensor: object) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _optimizer_state(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> dict[int, Any]:
    """Return the state of each parameter of a peer, on the mesh of the own parameter of that number."""
    groups = zip(given["param_groups"], optimizer.param_groups, strict=True)
    own = {
        number: each for theirs, mine in groups for number, each in zip(theirs["params"], mine["params"], strict=True)
    }
    return {number: _with_mesh(state, _mesh_of(own[number])) for number, state in given["state"].items()}


def _check_averaged(parts: Mapping[str, Any]) -> None:
    """Raise `ScriptInvalid` for a trained parameter whose gradients nothing averages over the ranks of the process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for name, part in parts.items():
        modules = list(part.modules()) if isinstance(part, torch.nn.Module) else []
        averaged = {
            id(each)
            for module in modules
            if isinstance(module, DistributedDataParallel)
            for each in module.parameters()
        }
        for parameter_name, parameter in part.named_parameters() if modules else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in averaged:
                raise ScriptInvalid(
                    f"expected parameter {parameter_name!r} of {name!r} to be sharded over the {dist.get_world_size()} ranks of "
                    "the process group, found one whose gradients nothing averages over them: pass the whole model to "
                    "fully_shard, or wrap it in DistributedDataParallel"
                )
