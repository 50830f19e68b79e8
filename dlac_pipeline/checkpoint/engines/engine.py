"""What the Checkpoint Manager asks of a training engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dlac_pipeline.checkpoint.stage.copies import Write

Convert = Callable[[Path, Path], None]
"""Reads a checkpoint's folder and writes what these ranks can load into an empty one; called at one rank only."""


class Engine(Protocol):
    """What the Checkpoint Manager asks of a training engine."""

    name: str

    def save(self, folder: Path, write: Write) -> None:
        """Hand over this rank's part, file by file in `folder`. Collective.

        Raises:
            OSError: from `write`; no rank may be left waiting for this one.
            SpecInvalid: there is something in the state that loading would refuse; nor then.
        """

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load this rank's part from `folder`, the checkpoint's or that of its conversion. Collective.

        Raises:
            CheckpointDamaged: there is no such state in the folder.
            CheckpointUnsafe: there is more in a file than tensors and plain values.
        """

    def conversion(self, saved_world_size: int) -> Convert | None:
        """What makes a checkpoint of so many ranks loadable by these; None: `load` takes it as it is.

        Raises:
            WorldSizeUnsupported: nothing does.
        """

    def modules(self) -> Mapping[str, Any]:
        """Return the modules whose weights a checkpoint has, by name. Parts that are no modules may be among them."""

    def step_applied(self) -> bool:
        """Whether the engine applied the last optimizer step (false on an fp16 overflow)."""
