"""The interface of training engines: a script's state as its ranks save and load it, and the files that it becomes.

A class with both protocols is an entry of the door `dlac.engines`, under the name that its checkpoints record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.lakehouse.errors import CheckpointError

Convert = Callable[[Path, Path], None]
"""Function that reads a checkpoint's folder and writes what these ranks can load into an empty one. Called at one rank only."""
Weights = dict[str, torch.Tensor]
"""Name -> tensor in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A checkpoint in a folder that is not DLAC's."""

    origin: Path
    engine: str
    """Name of the engine that loads it."""
    world_size: int
    """Ranks that saved it, where that matters."""
    files: list[Path]
    """Its files of tensors, if they may be exports of DLAC."""
    copy: Callable[[Path, Write], None]
    """Hands its files over, for a checkpoint's folder."""


class EngineFiles(Protocol):
    """The files of an engine's checkpoints, as commands read them without a script. The methods are of the class."""

    name: str
    """Name of the engine in the manifest of each checkpoint."""
    foreign_layout: str = ""
    """Library and files that `foreign` knows, for messages: "DeepSpeed (<tag>/*model_states.pt)"."""

    @classmethod
    def safe_classes(cls) -> Sequence[type]:
        """Return the classes that loading accepts beside tensors and plain values. None does anything when it is made."""
        return ()

    @classmethod
    def weights_in(cls, folder: Path, part: str) -> Weights:
        """Return the whole tensors of one part of a checkpoint. Raise `CheckpointError` if it has no such part."""
        raise CheckpointError(
            f"expected a checkpoint whose weights can be exported, found one of {cls.name!r}: its script or trainer reads it"
        )

    @classmethod
    def optimizer_in(cls, folder: Path, model: Weights, scratch: Path) -> Weights:
        """Return the optimizer's whole tensors, as `state.<parameter>.<key>`. `scratch` is an empty folder for conversions."""
        raise CheckpointError(
            "expected a checkpoint of DistributedState or of DeepSpeed at ZeRO 1 to 3, found one of "
            f"{cls.name!r}, whose optimizer does not know the names of parameters: export its weights with dlac checkpoint export"
        )

    @classmethod
    def foreign(cls, folder: Path) -> Foreign | None:
        """Return the checkpoint that the engine's library wrote into `folder` without DLAC, or None."""
        return None


class Engine(EngineFiles, Protocol):
    """The state of a script. The class is called with the object that a script restores, or with its parts by name."""

    loads_own_files: bool = False
    """True if a rank loads only its files and rank 0's of a checkpoint, when as many ranks saved it."""
    writes_itself: bool = False
    """True if another program writes the files. Then nothing is copied while training continues, and no state is in memory."""

    def take_ranks(self, tree: RankTree, *, lists: bool) -> None:
        """Receive the ranks that save together, before `load`. `lists` is true for one rank of every node."""
        return

    def check_stages(self, tree: RankTree, *, stage: int) -> None:
        """Check the state of a stage of a pipeline after a step. Collective. Raise `ScriptInvalid` if it cannot be saved."""
        return

    def save(self, folder: Path, write: Write) -> None:
        """Pass on this rank's part, file by file in `folder`. Collective. No rank may be left waiting after an error.

        Raise `OSError` from `write`, `SpecInvalid` if the state contains something that loading would refuse.
        """

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load this rank's part from `folder`, the checkpoint's or its conversion's. Collective.

        Raise `CheckpointDamaged` if it is not in the folder, `CheckpointUnsafe` if a file has more than `safe_classes` allow.
        """

    def conversion(self, saved_world_size: int) -> Convert | None:
        """Return the conversion of a checkpoint of so many ranks for these ranks. None (most engines): `load` takes it as it is.

        Raise `WorldSizeUnsupported` if no conversion exists.
        """
        return None

    def modules(self) -> Mapping[str, Any]:
        """Return the modules whose weights a checkpoint has, by name. Parts that are no modules may be among them."""

    def optimizers(self) -> Sequence[Any]:
        """Return optimizers whose tensors are copied until their next steps. None (most engines): all is copied at once."""
        return ()

    def step_applied(self) -> bool:
        """Return False if the engine skipped the last optimizer step, as on an fp16 overflow. Most engines apply each."""
        return True

    @classmethod
    def prepare_process(cls) -> None:
        """Prepare a process that has imported the engine's library, before its script builds anything with it."""
        return
