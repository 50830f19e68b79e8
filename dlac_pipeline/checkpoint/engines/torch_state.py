"""Replicated PyTorch state."""

import copy
import operator
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from dlac_pipeline.checkpoint.engines.engine import Engine, Weights
from dlac_pipeline.checkpoint.engines.exact_load import load_exactly
from dlac_pipeline.checkpoint.engines.model_names import bare_names
from dlac_pipeline.checkpoint.engines.rank_buffers import load_buffers, save_buffers, saved_buffers
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, plain_state
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.checkpoint.stage.streamed_file import Frozen
from dlac_pipeline.checkpoint.stage.watch import frozen_storages, plain_tensors, storage_key
from dlac_pipeline.lakehouse.errors import CheckpointError, SpecInvalid


class TorchState(Engine):
    """Replicated PyTorch state (plain, or DistributedDataParallel): rank 0 saves it, every rank loads it.

    Give it anything with `state_dict` and `load_state_dict`: `TorchState(model=model, optimizer=optimizer)`.
    """

    name = "torch"
    loads_own_files = True
    _FILE = "torch-state.pt"
    _GROUPS = "dlac.groups"
    """Beside the parts: optimizer -> the names of the parameters in each of its groups."""
    _FROZEN = "dlac.frozen"
    """Beside the parts: the name of the file with their frozen tensors, in whose places they have None."""

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    def save(self, folder: Path, write: Write) -> None:
        """Rank 0 saves one file, in which models have the names of the bare models. Other ranks save buffers of their own."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.save_equal(folder, write, {})
        self.save_own(folder, write)

    def save_own(self, folder: Path, write: Write) -> None:
        """Save this rank's buffers, if they may differ between ranks."""
        save_buffers(folder, self._parts, write)

    def save_equal(self, folder: Path, write: Write, changed: Mapping[str, Any]) -> None:
        """Save the part of the state that is equal on all ranks, with an earlier result of `changing`, if it is not empty."""
        if changed and changed.keys() != self._parts.keys():
            raise SpecInvalid(f"expected the parts {sorted(self._parts)!r} on rank 0, found {sorted(changed)!r}")
        states = {name: _bare_state(part) for name, part in self._parts.items()}
        for name, state in states.items():
            if is_sharded(state):
                raise SpecInvalid(
                    f"expected whole tensors in the part {name!r}, found sharded ones, which differ by rank: pass what "
                    "fully_shard has sharded as part of model=..., as in DistributedState(model=torch.nn.ModuleDict(...))"
                )
            if name in changed:
                states[name] = _with_changed(self._parts[name], state, changed[name])
        names = {parameter: name for name, parameter in self._parameters().items()}
        groups = {
            name: [[names.get(each, "") for each in group["params"]] for group in part.param_groups]
            for name, part in self._parts.items()
            if isinstance(part, Optimizer)
        }
        states[self._GROUPS] = groups
        if frozen := self._take_frozen(states):
            states[self._FROZEN] = "torch-frozen.pt"
            write(folder / states[self._FROZEN], Frozen(plain_state(frozen)))
        self.write_parts(folder, write, states)

    def changing(self) -> dict[str, Any]:
        """Return by part what scripts change between two steps of its optimizers: all but weights and optimizers' tensors.

        Modules without a weight in an optimizer, such as averages, are whole in it. They may be of rank 0 only.
        """
        trained = {each for part in self.optimizers() for group in part.param_groups for each in group["params"]}
        return {name: _changing(part, trained) for name, part in self._parts.items()}

    def held_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are not in `changing`, and further ones of modules."""
        modules = [part for part in self._parts.values() if isinstance(part, Module)]
        states = [each for part in self.optimizers() for values in part.state.values() for each in values.values()]
        plain = states if set(map(type, states)) == {torch.Tensor} else plain_tensors(states)
        return [*(each for module in modules for each in module.parameters()), *plain]

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Every rank reads it, tensors and plain values only.

        The file is mapped: another program may write it later, so no part may keep its tensors.
        """
        state = self._read(folder, mmap=True)
        for name, groups in state.get(self._GROUPS, {}).items():
            self._add_groups(self._parts.get(name), groups, state[name])
        found = {part: state[part] for part in self._parts if isinstance(state.get(part), Mapping)}
        saved = {f"{part}.{name}": each for part, values in found.items() for name, each in values.items()}
        parameters = self._parameters().items()
        dtypes = {each: saved[name].dtype for name, each in parameters if isinstance(saved.get(name), torch.Tensor)}
        for name, part in self._parts.items():
            load_exactly(part, state[name], dtypes, is_mapped=True)
        load_buffers(folder, self._parts, saved_world_size=saved_world_size)

    @classmethod
    def weights_in(cls, folder: Path, part: str) -> Weights:
        """Return the tensors of a saved part. Raise `CheckpointError` if it does not exist."""
        parts = cls.parts_in(folder)
        if part not in parts:
            raise CheckpointError(f"expected a part named {part!r} in the checkpoint, found {sorted(parts)!r}")
        return {name: value for name, value in parts[part].items() if isinstance(value, torch.Tensor)}

    @classmethod
    def write_parts(cls, folder: Path, write: Write, states: dict[str, Any]) -> None:
        """Hand over what `parts_in` gives. Raise `SpecInvalid` if loading would refuse something in it."""
        write(folder / cls._FILE, plain_state(states))

    @classmethod
    def parts_in(cls, folder: Path) -> dict[str, Any]:
        """Return the saved parts of `folder` by name."""
        return {name: state for name, state in cls._read(folder).items() if name != cls._GROUPS}

    @classmethod
    def _read(cls, folder: Path, *, mmap: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = load_tensors(folder / cls._FILE, mmap=mmap)
        if file := found.pop(cls._FROZEN, None):
            for part, tensors in load_tensors(folder / file, mmap=mmap).items():
                found[part].update(tensors)
        return found

    def _take_frozen(self, states: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        """Return the frozen tensors of modules by part and name, and replace them in `states` by None."""
        storages, taken = frozen_storages(self._parts.values()), {}
        for part, state in states.items() if storages else ():
            if isinstance(self._parts.get(part), Module) and isinstance(state, dict):
                found = {
                    name: each for name, each in state.items() if storages & {*map(storage_key, plain_tensors([each]))}
                }
                taken[part], states[part] = found, copy.copy(state)  # which keeps the attributes of a state
                states[part].update(dict.fromkeys(found))
        return taken

    def modules(self) -> Mapping[str, Any]:
        """Return the parts."""
        return self._parts

    def optimizers(self) -> list[Optimizer]:
        """Return the parts that are optimizers."""
        return [part for part in self._parts.values() if isinstance(part, Optimizer)]

    def _parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the parts that are modules, by part and name in the bare model."""
        modules = {name: part for name, part in self._parts.items() if isinstance(part, Module)}
        owned = {part: dict(module.named_parameters()) for part, module in modules.items()}
        return {
            f"{part}.{bare}": own[name]
            for part, own in owned.items()
            for name, bare in bare_names(modules[part], own).items()
        }

    def _add_groups(self, optimizer: Any, saved: list[list[str]], state: Mapping[str, Any]) -> None:
        """Add the groups that the script adds to an optimizer during training, as when it thaws a layer."""
        parameters = self._parameters()
        first = len(optimizer.param_groups) if isinstance(optimizer, Optimizer) else len(saved)
        for names, group in zip(saved[first:], state["param_groups"][first:], strict=True):
            if parameters.keys() >= set(names):
                optimizer.add_param_group({**group, "params": [parameters[name] for name in names]})


def reshard(model: Module) -> None:
    """Let a model that `fully_shard` has sharded have its shards as parameters.

    A forward pass lets the outermost module have whole parameters until the backward pass, which an evaluation leaves out.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def is_sharded(state: Any) -> bool:
    """Return whether a state has a DTensor."""
    if isinstance(state, Mapping | list | tuple):
        return any(map(is_sharded, state.values() if isinstance(state, Mapping) else state))
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(state, module.DTensor)


def _changing(part: Any, trained: Container[Parameter]) -> Any:
    if isinstance(part, Optimizer):
        return [{**group, "params": len(group["params"])} for group in part.param_groups]
    if isinstance(part, Module) and any(each in trained for each in part.parameters()):
        return dict(saved_buffers(part))
    return _bare_state(part)


def _with_changed(part: Any, state: Any, changed: Any) -> Any:
    """Return the state of a part as it was when `changed` was taken. Raise `SpecInvalid` if something else has changed."""
    if isinstance(part, Optimizer):
        if [len(group["params"]) for group in state["param_groups"]] != [group["params"] for group in changed]:
            raise SpecInvalid(
                "expected as many parameters in each group of an optimizer as before its step, found others"
            )
        groups = [
            {**former, "params": group["params"]} for group, former in zip(state["param_groups"], changed, strict=True)
        ]
        return {**state, "param_groups": groups}
    if not isinstance(part, Module):
        return changed
    if not all(isinstance(each, torch.Tensor) for each in state.values()):
        raise SpecInvalid(
            "expected only tensors in the state of a module, found an extra state, which may have changed"
        )
    state.update(changed)  # which keeps the versions of its modules
    return state


def _bare_state(part: Any) -> Any:
    """Return the state of a part. A wrapper may be added or removed before the state is loaded again."""
    state = part.state_dict()
    if not isinstance(part, Module):
        return state
    names = bare_names(part, state)
    return (
        state if all(map(operator.eq, names, names.values())) else {names[name]: each for name, each in state.items()}
    )
