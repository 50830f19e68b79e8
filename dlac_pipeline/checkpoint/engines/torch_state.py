"""Replicated PyTorch state."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, plain_state
from dlac_pipeline.checkpoint.stage.copies import Write

_WRAPPER = "module."
"""Prefix of data-parallel wrappers before the names of the model inside."""
_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""Methods of a module that load its state."""
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names by which `torch.compile`, FSDP and activation checkpointing hold the module that they wrap. No model uses them."""


class TorchState(Engine):
    """Replicated PyTorch state (plain, or DistributedDataParallel): rank 0 saves it, every rank loads it.

    Give it anything with `state_dict` and `load_state_dict`: `TorchState(model=model, optimizer=optimizer)`.
    """

    name = "torch"
    _FILE = "torch-state.pt"
    _WRAPPED = "dlac.wrapped"
    """Beside the parts, where one has a data-parallel wrapper: part -> where in its names the wrapper put "module."."""

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    def save(self, folder: Path, write: Write) -> None:
        """Rank 0 saves one file."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            states = {name: part.state_dict() for name, part in self._parts.items()}
            wrapped = {name: places for name, part in self._parts.items() if (places := _wrapped_places(part))}
            self.write_parts(folder, write, {**states, self._WRAPPED: wrapped} if wrapped else states)

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Every rank reads it, tensors and plain values only.

        The file is mapped: another program may write it later, so no part may keep its tensors.
        """
        state = load_tensors(folder / self._FILE, mmap=True)
        for name, part in self._parts.items():
            part.load_state_dict(state[name] if _only_copies(part) else copy.deepcopy(state[name]))

    @classmethod
    def write_parts(cls, folder: Path, write: Write, states: dict[str, Any]) -> None:
        """Hand over what `parts_in` gives. Raise `SpecInvalid` if loading would refuse something in it."""
        write(folder / cls._FILE, plain_state(states))

    @classmethod
    def parts_in(cls, folder: Path) -> dict[str, Any]:
        """Return the saved parts of `folder` by name."""
        found: dict[str, Any] = load_tensors(folder / cls._FILE)
        return {name: state for name, state in found.items() if name != cls._WRAPPED}

    @classmethod
    def bare_weights(cls, folder: Path, part: str) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a part by their names without a data-parallel wrapper, or None without such a part."""
        found: dict[str, Any] = load_tensors(folder / cls._FILE)
        if part not in found or part == cls._WRAPPED:
            return None
        places = found.get(cls._WRAPPED, {}).get(part, [])
        tensors: dict[str, torch.Tensor] = {}
        for name, value in found[part].items():
            if isinstance(value, torch.Tensor):
                bare = name
                for place in sorted(places, key=len, reverse=True):
                    if bare.startswith(place):
                        bare = place.removesuffix(_WRAPPER) + bare.removeprefix(place)
                tensors[bare] = value
        return tensors

    def modules(self) -> Mapping[str, Any]:
        """Return the parts."""
        return self._parts


def _only_copies(part: Any) -> bool:
    """Return whether `load_state_dict` copies tensors into those of a part, and keeps none: that of torch's own modules does."""
    modules = [*part.modules()] if isinstance(part, torch.nn.Module) else []
    expected = [getattr(torch.nn.Module, name) for name in _LOADING]
    return (
        bool(modules)
        and not torch.__future__.get_swap_module_params_on_conversion()
        and all([getattr(type(each), name) for name in _LOADING] == expected for each in modules)
        and not any(name in vars(each) for each in modules for name in _LOADING)
        and not any(each._load_state_dict_pre_hooks for each in modules)
    )


def unwrapped_name(name: str) -> str:
    """Return the name of a tensor in the model without these wrappers."""
    return ".".join(each for each in name.split(".") if each not in WRAPPERS)


def _wrapped_places(part: Any) -> list[str]:
    """Return the prefixes of names that end in a data-parallel wrapper's. A model's own attribute `module` is none."""
    modules = part.named_modules() if isinstance(part, torch.nn.Module) else ()
    found = (name for name, module in modules if isinstance(module, DataParallel | DistributedDataParallel))
    return [f"{name}.{_WRAPPER}" if name else _WRAPPER for name in found]
