"""Optimizer states by the names of parameters, as a checkpoint of `DistributedState` has them.

A load takes the tensors that the index lists. torch's `get_state_dict` makes a step of a new optimizer instead, to learn them:
it asks for states that parameters without a gradient never had, and leaves out states of frozen parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgpack
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from dlac_pipeline.checkpoint.engines.exact_load import load_exactly
from dlac_pipeline.checkpoint.engines.model_names import bare_names
from dlac_pipeline.extensions.sharded.shards import ShardReader
from dlac_pipeline.lakehouse.errors import CheckpointError, ResumeMismatch, ScriptInvalid, SpecInvalid

_STATE, _GROUPS, _PARAMETERS = "state", "param_groups", "params"
_SIZES = "param_groups.sizes"
"""Beside them: the number of groups of each optimizer. The groups of one follow each other."""
_EMPTY = "param_groups.empty"
"""Beside them: the paths of empty dicts, which DCP leaves out."""


Share = Callable[[bytes], Sequence[bytes]]
"""What a rank says -> what all ranks say, each once. Collective."""


class OptimizerStates:
    """The states of the optimizers of one model, or of parts of it. Each parameter has one optimizer at most.

    Ranks may have different parts, as stages of a pipeline. Groups in a checkpoint have the parameters of all parts.
    """

    def __init__(self, models: Sequence[Module], optimizers: Sequence[Optimizer], share: Share) -> None:
        self._models = models
        self._optimizers = optimizers
        self._share = share

    def state(self) -> dict[str, Any]:
        """Return {"state": {parameter: its state}, "param_groups": [...], ...} with the tensors in use.

        A parameter without a state, as one that never had a gradient, is left out.

        Raises:
            ScriptInvalid: an optimizer has a parameter that the model does not have, or two have the same.
            SpecInvalid: an optimizer has a state that could not be loaded again, or may differ by rank, or other groups than at
                another rank.
        """
        names, tied = self._names(), self._tied_names()
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer in self._optimizers:
            found = optimizer.state_dict()
            if strange := found.keys() - {_STATE, _GROUPS}:
                raise SpecInvalid(
                    f"expected {_STATE!r} and {_GROUPS!r} in the state of {type(optimizer).__name__}, found {sorted(strange)!r}, "
                    "which DistributedState does not save: use dlac_pipeline.TorchState"
                )
            parameters = [each for group in optimizer.param_groups for each in group[_PARAMETERS]]
            numbered = [names[each] for each in parameters]
            if nameless := [key for key in found[_STATE] if not isinstance(key, int)]:
                raise SpecInvalid(
                    f"expected a state of each parameter in {type(optimizer).__name__}, found one of {nameless[0]!r}, no "
                    "parameter: use dlac_pipeline.TorchState"
                )
            for key, each in found[_STATE].items():
                _check_whole(numbered[key], parameters[key], each)
                state |= dict.fromkeys(tied[parameters[key]], each)
            groups += [
                {**group, _PARAMETERS: [name for number in group[_PARAMETERS] for name in tied[parameters[number]]]}
                for group in found[_GROUPS]
            ]
        sizes, both = [len(each.param_groups) for each in self._optimizers], {_STATE: state, _GROUPS: groups}
        groups, empty = self._with_all_parts(groups, sizes, [*_empty_paths(both)])
        return {_STATE: state, _GROUPS: groups, _SIZES: sizes, _EMPTY: empty}

    def targets(self, reader: ShardReader) -> dict[str, Any]:
        """Return name -> tensor to load into, or None for a plain value, for each part of an optimizer in the index."""
        parameters = self._parameters()
        targets: dict[str, Any] = {}
        for name, path in self._paths(reader):
            entry = reader.index["tensors"].get(name)
            parameter = parameters.get(str(path[1])) if path[0] == _STATE and path[-1] != "step" else None
            targets[name] = None if entry is None else _target(entry["size"], entry["dtype"], parameter)
        return targets

    def load(self, reader: ShardReader, values: Mapping[str, Any]) -> None:
        """Set the states of the optimizers to the loaded values of the `targets`.

        Raises:
            ResumeMismatch: the checkpoint has the state of a parameter that no optimizer has, or groups differ.
            CheckpointError: an adopted checkpoint lacks a part of a parameter's state.
        """
        parameters = self._parameters()
        found: dict[str, Any] = {_STATE: {}, _GROUPS: [], _SIZES: []}
        for name, path in self._paths(reader):
            set_element(found, path, values[name])
        for empty in found.get(_EMPTY, ()):
            if empty[0] != _STATE or not parameters.keys().isdisjoint(empty[1:2]):
                set_element(found, tuple(empty), {})
        groups = [self._groups_of(number, found) for number in range(len(self._optimizers))]
        if not reader.is_adopted:
            for optimizer, saved in zip(self._optimizers, groups, strict=True):
                self._add_groups(optimizer, saved)
            self._check_used(reader, found)
        owners = self._names()
        model = {name: reader.index["tensors"].get(f"model.{name}") for name in owners.values()}
        dtypes = {each: entry["dtype"] for each, name in owners.items() if (entry := model[name]) is not None}
        for optimizer, saved in zip(self._optimizers, groups, strict=True):
            if reader.is_adopted:
                _check_complete(optimizer, owners, found[_STATE])
            if found[_STATE] or found[_GROUPS]:
                load_exactly(optimizer, _numbered(optimizer, owners, found[_STATE], saved), dtypes)

    def check(self) -> None:
        """Raise `ScriptInvalid` as `state`."""
        self._names()

    def _parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the model by name."""
        found: dict[str, Parameter] = {}
        for model in self._models:
            own = dict(model.named_parameters())
            named = {bare: own[name] for name, bare in bare_names(model, own).items()}
            if twice := sorted(found.keys() & named.keys()):
                raise ScriptInvalid(
                    f"expected parts of a model whose parameters have the names that they have in the whole model, found "
                    f"{twice[0]!r} in two parts: name the layers of each part by their numbers in the model"
                )
            found |= named
        return found

    def _tied_names(self) -> dict[Parameter, list[str]]:
        """Return all names of each parameter: on another mesh each name of a tied one may be a parameter of its own."""
        found: dict[Parameter, list[str]] = {}
        for model in self._models:
            own = dict(model.named_parameters(remove_duplicate=False))
            for name, bare in bare_names(model, own).items():
                found.setdefault(own[name], []).append(bare)
        return found

    def _paths(self, reader: ShardReader) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield (name in the index, path below "optimizer") of what this rank needs. A group may be added for its parameters."""
        parameters = self._parameters()
        for name, path in _optimizer_paths(reader, set(self._names().values())):
            if path[0] != _STATE or path[1] in parameters:
                yield name, path

    def _with_all_parts(
        self, groups: Sequence[dict[str, Any]], sizes: list[int], empty: list[list[str | int]]
    ) -> tuple[list[dict[str, Any]], list[list[str | int]]]:
        """Return groups with the parameters of all ranks, and the empty dicts of all ranks. Collective."""
        own = [sizes, [group[_PARAMETERS] for group in groups], empty]
        parts = [msgpack.unpackb(each) for each in self._share(msgpack.packb(own))]
        if any(each[0] != parts[0][0] for each in parts):
            raise SpecInvalid(
                f"expected as many groups of parameters at all stages, found {[each[0] for each in parts]!r} by optimizer: make "
                "the same optimizers and groups at each stage"
            )
        merged = [
            {**group, _PARAMETERS: [*dict.fromkeys(chain.from_iterable(each[1][number] for each in parts))]}
            for number, group in enumerate(groups)
        ]
        return merged, [list(path) for path in dict.fromkeys(tuple(path) for each in parts for path in each[2])]

    def _groups_of(self, number: int, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the saved groups of an optimizer that had its parameters, or its place if it had none."""
        if not found[_SIZES]:  # another program saved them
            return list(found[_GROUPS])
        groups, names = iter(found[_GROUPS]), self._names()
        own = {names[parameter] for group in self._optimizers[number].param_groups for parameter in group[_PARAMETERS]}
        mine: list[dict[str, Any]] = []
        for place, size in enumerate(found[_SIZES]):
            saved = list(islice(groups, size))
            used = {name for group in saved for name in group[_PARAMETERS]}
            if own & used or (not used and place == number):
                mine += saved
        return mine

    def _add_groups(self, optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
        """Add the groups that the script adds during training, as when it thaws a layer."""
        tied, own = self._tied_names(), self._names()
        parameters = {name: each for each, names in tied.items() for name in names}
        known = {name for each in own for name in tied[each]}
        for group in saved[len(optimizer.param_groups) :]:
            names = group[_PARAMETERS]
            if known.isdisjoint(names) and parameters.keys() >= set(names):
                optimizer.add_param_group({**group, _PARAMETERS: [*dict.fromkeys(parameters[name] for name in names)]})

    def _names(self) -> dict[Parameter, str]:
        """Return the name of each parameter of the optimizers."""
        known = {parameter: name for name, parameter in self._parameters().items()}
        names: dict[Parameter, str] = {}
        for optimizer in self._optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group[_PARAMETERS]):
                if parameter not in known:
                    raise ScriptInvalid(
                        f"expected parameters of the model in {type(optimizer).__name__}, found one of shape "
                        f"{tuple(parameter.shape)!r} that the model does not have: make the optimizer after fully_shard, "
                        "before any forward pass, and pass model=... with all of its parameters"
                    )
                if parameter in names:
                    raise ScriptInvalid(
                        f"expected one optimizer for each parameter, found {known[parameter]!r} in two: leave it out of one"
                    )
                names[parameter] = known[parameter]
        return names

    def _check_used(self, reader: ShardReader, found: Mapping[str, Any]) -> None:
        """Check that some rank has each saved parameter. Collective."""
        tied = self._tied_names()
        own = msgpack.packb(sorted(name for each in self._names() for name in tied[each]))
        names = {name for each in self._share(own) for name in msgpack.unpackb(each)}
        saved = {str(path[1]) for _, path in _optimizer_paths(reader, names) if path[0] == _STATE}
        saved |= {name for group in found[_GROUPS] for name in group[_PARAMETERS]}
        if lost := sorted(saved - names):
            raise ResumeMismatch(
                f"expected optimizers with the parameters of the checkpoint, found none with {lost[:4]!r}"
                f"{' and others' if lost[4:] else ''}: pass the optimizers as they were, before run.restore"
            )


def _numbered(
    optimizer: Optimizer,
    names: Mapping[Parameter, str],
    states: Mapping[str, Any],
    saved_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the state for one optimizer. Settings that the checkpoint lacks stay as the script made them."""
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    number = 0
    for place, own in enumerate(optimizer.param_groups):
        group_names = [names[parameter] for parameter in own[_PARAMETERS]]
        saved = [group for group in saved_groups if not set(group_names).isdisjoint(group[_PARAMETERS])]
        saved = saved[:1] if all(_settings(each) == _settings(saved[0]) for each in saved) else saved
        if len(saved) > 1 or (saved_groups and group_names and not saved):
            raise ResumeMismatch(
                f"expected the parameter groups of the checkpoint, found a group with {group_names[:4]!r}, which are in "
                f"{len(saved)} of its groups: make the optimizer's groups as they were"
            )
        if not group_names:
            saved = [group for group in saved_groups[place : place + 1] if not group[_PARAMETERS]]
        settings = {**own, **(saved[0] if saved else {})}
        numbers = range(number, number + len(group_names))
        groups.append({**settings, _PARAMETERS: list(numbers)})
        state |= {each: states[name] for each, name in zip(numbers, group_names, strict=True) if name in states}
        number += len(group_names)
    return {_STATE: state, _GROUPS: groups}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, which groups of several parts of a model may have in common."""
    return {name: each for name, each in group.items() if name != _PARAMETERS}


def _optimizer_paths(reader: ShardReader, parameters: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield (name in the index, path below "optimizer"). Another program may have saved `state.<parameter>.<key>` as one key."""
    by_length = sorted(parameters, key=len, reverse=True)
    for name, path in reader.index["paths"].items():
        if path[0] != "optimizer":
            continue
        below = tuple(path[1:])
        if reader.is_adopted and below[0] not in (_STATE, _GROUPS):
            kind, _, rest = str(below[0]).partition(".")
            owner = next((each for each in by_length if rest.startswith(f"{each}.")), None)
            if kind != _STATE or owner is None:
                continue
            below = (_STATE, owner, rest.removeprefix(f"{owner}."))
        elif reader.is_adopted and below[0] == _STATE and below[1] not in parameters:
            continue
        yield name, below


def _target(size: Sequence[int], dtype: torch.dtype, parameter: Parameter | None) -> torch.Tensor:
    """Return a tensor to load into, shared out as the parameter if it has the same shape."""
    if parameter is not None and parameter.shape == torch.Size(size):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = None if parameter is None else parameter.device
    whole = torch.empty(size, dtype=dtype, device=device)
    if isinstance(parameter, DTensor) and size:
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole


def _check_whole(name: str, parameter: Parameter, value: Any) -> None:
    """Raise `SpecInvalid` for a plain tensor in the state of a sharded parameter. DCP would save one rank's for all."""
    if not isinstance(parameter, DTensor) or all(each.is_replicate() for each in parameter.placements):
        return
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim():
        raise SpecInvalid(
            f"expected DTensors in the optimizer's state of the sharded parameter {name!r}, found a plain tensor of shape "
            f"{tuple(value.shape)!r}, which may differ by rank: make it with torch.zeros_like(parameter) or DTensor.from_local"
        )
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_whole(name, parameter, each)


def _empty_paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[list[str | int]]:
    """Yield the path of each empty dict. Raise `SpecInvalid` for a key that is no string: an index has names."""
    if isinstance(value, Mapping) and not value:
        yield [*path]
    for key, each in (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    ):
        if isinstance(value, Mapping) and not isinstance(key, str):
            raise SpecInvalid(
                f"expected strings as keys in the state of an optimizer, found {key!r} in "
                f"{'.'.join(map(str, ('optimizer', *path)))}: use dlac_pipeline.TorchState"
            )
        yield from _empty_paths(each, (*path, key))


def _check_complete(
    optimizer: Optimizer, names: Mapping[Parameter, str], states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Check that all parameters of a group that have a state have the same keys. Files of another program may be missing."""
    for group in optimizer.param_groups:
        found = {names[parameter]: states.get(names[parameter], {}) for parameter in group[_PARAMETERS]}
        expected = {key for each in found.values() for key in each}
        for name, each in found.items():
            if each and (missing := sorted(expected - each.keys())):
                raise CheckpointError(
                    f"expected {sorted(expected)!r} in the adopted optimizer's state of each parameter, found {name!r} without "
                    f"{missing!r}: adopt a whole checkpoint, or one without an optimizer"
                )
