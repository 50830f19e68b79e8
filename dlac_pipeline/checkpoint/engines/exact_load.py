"""Load of an optimizer's state as it was saved. torch's own load gives each tensor the type of its parameter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer


def load_exactly(optimizer: Optimizer, state: Mapping[str, Any], dtypes: Mapping[Parameter, torch.dtype]) -> None:
    """Load a state. What torch converts, such as weights in fp32 of a parameter in bf16, comes back as it was saved.

    `dtypes` are those of parameters when they were saved. A script that has changed one gets torch's conversion.
    """
    optimizer.load_state_dict(dict(state))
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
