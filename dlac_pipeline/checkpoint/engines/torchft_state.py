"""Replicated PyTorch state of a replica group, whose peers have the same state."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dlac_pipeline.checkpoint.engines.torch_state import TorchState

Reduce = Callable[[list[torch.Tensor], torch.Tensor], bool]
"""(gradients, loss) -> True if the step commits. The gradients are then their mean over the groups present."""


class TorchFTState(TorchState):
    """State of a replica group: `TorchFTState(model=model, optimizer=optimizer)`, with the bare module.

    Checkpoints are those of `TorchState`. A newcomer gets all parts from a peer, so each of them has `state_dict` and
    `load_state_dict`, and the parts that are modules have the parameters that are trained.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._reduce: Reduce | None = None

    def join(self, reduce: Reduce) -> None:
        """Reduce with the groups of a run from now on."""
        self._reduce = reduce

    def reduce(self, loss: torch.Tensor) -> bool:
        """Average the gradients over the groups present. Return True if the step commits: then call `optimizer.step()`.

        `loss` is `batch.mean(...)`. A step that does not commit changes nothing, and its batch is read again. Without replica
        groups every step commits. A parameter without a gradient gets zeros, because a peer may have one.
        """
        if self._reduce is None:
            return True
        gradients = []
        for part in self._parts.values():
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    gradients.append(parameter.grad)
        return self._reduce(gradients, loss)

    def peer_state(self) -> dict[str, Any]:
        """Return the state of all parts, for a peer."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Load what `peer_state` of a peer returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
