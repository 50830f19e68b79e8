"""Replicated PyTorch state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlac_pipeline.checkpoint.engines.engine import Convert
from dlac_pipeline.checkpoint.engines.plain_state import plain_state
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.writing import Write


class TorchState:
    """Replicated PyTorch state (plain, or DistributedDataParallel): rank 0 saves it, every rank loads it.

    Give it anything with `state_dict` and `load_state_dict`: `TorchState(model=model, optimizer=optimizer)`.
    """

    name = "torch"
    _FILE = "torch-state.pt"

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    def save(self, folder: Path, write: Write) -> None:
        """Rank 0 saves one file."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.write_parts(folder, write, {name: part.state_dict() for name, part in self._parts.items()})

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Every rank reads it, tensors and plain values only."""
        state = self.parts_in(folder)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    @classmethod
    def write_parts(cls, folder: Path, write: Write, states: dict[str, Any]) -> None:
        """Hand over what `parts_in` gives.

        Raises:
            SpecInvalid: loading would refuse something in it.
        """
        write(folder / cls._FILE, plain_state(states))

    @classmethod
    def parts_in(cls, folder: Path) -> dict[str, Any]:
        """What was saved in `folder`, by part."""
        found: dict[str, Any] = load_tensors(folder / cls._FILE)
        return found

    def conversion(self, saved_world_size: int) -> Convert | None:
        """Replicated state suits any number of ranks."""
        return None

    def step_applied(self) -> bool:
        """Plain PyTorch applies every step."""
        return True
