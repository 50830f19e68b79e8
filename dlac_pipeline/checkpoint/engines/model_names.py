"""Names of a model's tensors without what wraps the model: data-parallel wrappers, `torch.compile` and others."""

from collections.abc import Iterable

from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names by which `torch.compile`, FSDP and activation checkpointing hold the module that they wrap. No model uses them."""
_WRAPPER = "module."
"""Prefix of data-parallel wrappers before the names of the model inside."""


def unwrapped_name(name: str) -> str:
    """Return the name of a tensor in the model without these wrappers."""
    return ".".join(each for each in name.split(".") if each not in WRAPPERS)


def bare_names(model: Module, names: Iterable[str]) -> dict[str, str]:
    """Return name -> its name in the bare model, without `WRAPPERS` and data-parallel wrappers.

    A model's own attribute `module` is no wrapper.
    """
    found = (
        name for name, module in model.named_modules() if isinstance(module, DataParallel | DistributedDataParallel)
    )
    places = sorted((f"{name}.{_WRAPPER}" if name else _WRAPPER for name in found), key=len, reverse=True)
    return {name: unwrapped_name(_without(places, name)) for name in names}


def _without(places: list[str], name: str) -> str:
    """Return a name without the last word of each of its prefixes in `places`, longest first."""
    for place in places:
        if name.startswith(place):
            name = place.removesuffix(_WRAPPER) + name.removeprefix(place)
    return name
