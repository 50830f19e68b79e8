"""The interface of a training engine to the Checkpoint Manager."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dlac_pipeline.checkpoint.stage.copies import Write

Convert = Callable[[Path, Path], None]
"""Function that reads a checkpoint's folder and writes what these ranks can load into an empty one. Called at one rank only."""


class Engine(Protocol):
    """The interface of a training engine to the Checkpoint Manager."""

    name: str

    def save(self, folder: Path, write: Write) -> None:
        """Pass on this rank's part, file by file in `folder`. Collective. No rank may be left waiting after an error.

        Raise `OSError` from `write`, `SpecInvalid` if the state contains something that loading would refuse.
        """

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load this rank's part from `folder`, the checkpoint's or that of its conversion. Collective.

        Raise `CheckpointDamaged` if it is not in the folder, `CheckpointUnsafe` if a file has more than tensors and plain values.
        """

    def conversion(self, saved_world_size: int) -> Convert | None:
        """Return the conversion of a checkpoint of so many ranks for these ranks. None (most engines): `load` takes it as it is.

        Raise `WorldSizeUnsupported` if no conversion exists.
        """
        return None

    def modules(self) -> Mapping[str, Any]:
        """Return the modules whose weights a checkpoint has, by name. Parts that are no modules may be among them."""

    def step_applied(self) -> bool:
        """Return False if the engine skipped the last optimizer step, as on an fp16 overflow. Most engines apply each."""
        return True
