"""Load of a saved state into a part of a script, so that the part equals the saved one.

torch's own load changes or misunderstands a state in four cases, for which `load_exactly` makes up:

- An optimizer's load gives each tensor the type of its parameter, such as bf16 for weights in fp32.
- Wrappers such as DDP or `torch.compile` change the names in a model's state. A checkpoint has the names of the bare model.
- A state that was renamed or put together has lost the versions of its modules' classes, and a class may take it for an old one.
- Some parts keep the tensors that they are given, which may be in a mapped file that another program writes later.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from dlac_pipeline.checkpoint.engines.model_names import bare_names

_UNKNOWN: Mapping[Parameter, torch.dtype] = MappingProxyType({})
_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""Methods of a module that load its state."""


def load_exactly(
    part: Any,
    state: Any,
    dtypes: Mapping[Parameter, torch.dtype] = _UNKNOWN,
    *,
    is_mapped: bool = False,
    set_state: Callable[[Any], object] | None = None,
) -> None:
    """Load a saved state into an optimizer, a module, or another part with `load_state_dict`.

    `dtypes` are the types of parameters when they were saved. An optimizer of a parameter that has changed its type gets torch's
    conversion. `is_mapped`: the state's tensors are in a file. `set_state` loads a model's state by the names of the bare model.
    """
    if is_mapped and not _only_copies(part):
        state = copy.deepcopy(state)
    if isinstance(part, Optimizer):
        part.load_state_dict(dict(state))
        _restore_types(part, state, dtypes)
    elif isinstance(part, Module) and isinstance(state, dict):
        named = _with_versions(state if set_state else _as_named_now(part, state), part)
        (set_state or part.load_state_dict)(named)
    else:
        part.load_state_dict(state)


def _restore_types(optimizer: Optimizer, state: Mapping[str, Any], dtypes: Mapping[Parameter, torch.dtype]) -> None:
    numbers = [each for group in state["param_groups"] for each in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):  # an optimizer may load in a way of its own
        saved, loaded = state["state"].get(number), optimizer.state.get(parameter)
        if saved and loaded and dtypes.get(parameter, parameter.dtype) == parameter.dtype:
            loaded.update(_as_saved(saved, loaded))


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Return the loaded value with the types of the saved one, on the device where it is."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if type(saved) in (list, tuple) and type(loaded) is type(saved):
        return type(saved)(map(_as_saved, saved, loaded))
    return saved if isinstance(saved, str) else loaded  # torch makes another text of one


def _as_named_now(module: Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the bare model with the names that its tensors have in a module now."""
    names = {bare: name for name, bare in bare_names(module, module.state_dict()).items() if bare != name}
    return {names.get(name) or name: each for name, each in state.items()} if names else state


def _with_versions(state: dict[str, Any], module: Module) -> dict[str, Any]:
    """Return a state with the versions of the save, or else with the present versions of a module's classes."""
    versions = None if hasattr(state, "_metadata") else getattr(module.state_dict(), "_metadata", None)
    if versions is None:
        return state
    found = OrderedDict(state)
    vars(found)["_metadata"] = versions
    return found


def _only_copies(part: Any) -> bool:
    """Return whether `load_state_dict` copies tensors into a part's tensors, and keeps none: torch's own modules do."""
    modules = [*part.modules()] if isinstance(part, Module) else []
    expected = [getattr(Module, name) for name in _LOADING]
    return (
        bool(modules)
        and not torch.__future__.get_swap_module_params_on_conversion()
        and all([getattr(type(each), name) for name in _LOADING] == expected for each in modules)
        and not any(name in vars(each) for each in modules for name in _LOADING)
        and not any(each._load_state_dict_pre_hooks for each in modules)
    )
