"""The nondeterministic kernels of a training step, by name. Argument: JSON of model.

PyTorch warns of those that it knows. A repeated step also shows whether its gradients are the same.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_loading import Trainer  # type: ignore[import-not-found]  # in this folder

_NAMED = re.compile(r"^(\S+) does not have a deterministic implementation")


def name_kernels(compute: Callable[[], None]) -> list[str]:
    """Return the kernels in PyTorch's warnings, sorted. A warning without a name gives its first sentence."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compute()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    messages = [str(one.message) for one in caught]
    return sorted({_name_of(message) for message in messages if "determinis" in message})


def _name_of(message: str) -> str:
    named = _NAMED.match(message)
    return named[1] if named else message.split(". ", maxsplit=1)[0].strip()


def find_kernels(size: dict[str, int]) -> dict[str, Any]:
    """Return the names, and the number of parameters whose gradients differ in a repeated step."""
    trainer = Trainer(size)
    generator = torch.Generator().manual_seed(0)
    shape = (size["batch"], size["length"])
    tokens = torch.randint(0, size["vocab_size"], shape, generator=generator).to(trainer.device)
    first, second = _gradients(trainer, tokens), _gradients(trainer, tokens)
    differing = [name for name, gradient in first.items() if not torch.equal(gradient, second[name])]
    return {
        "kernels": name_kernels(lambda: trainer.step(tokens)),
        "differing_gradients": differing,
        "parameters": len(first),
    }


def _gradients(trainer: Trainer, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    trainer.gradients(tokens)
    named = trainer.model.named_parameters()
    return {name: parameter.grad.detach().cpu().clone() for name, parameter in named if parameter.grad is not None}


if __name__ == "__main__":
    print(json.dumps(find_kernels(json.loads(sys.argv[1])["model"])))
