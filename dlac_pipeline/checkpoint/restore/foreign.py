"""Checkpoints that others wrote: what they are, and their files as an engine of ours loads them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from dlac_pipeline.checkpoint.engines.deepspeed_state import DeepSpeedState
from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.engines.shards import PlainSavePlanner, ShardWriter
from dlac_pipeline.checkpoint.engines.torch_state import TorchState
from dlac_pipeline.checkpoint.engines.universal import safe_classes
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.lakehouse.errors import SpecInvalid

_RANK = re.compile(r"zero_pp_rank_(\d+)_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A checkpoint in a folder that is not DLAC's."""

    origin: Path
    engine: str
    """Of ours, that loads it."""
    world_size: int
    """Ranks that saved it, where that matters."""
    copy: Callable[[Path, Write], None]
    """Hands its files over, for a checkpoint's folder."""


def foreign_checkpoint(folder: Path, *, tag: str | None = None) -> Foreign:
    """Return the DeepSpeed or DCP checkpoint in `folder`. `tag` is DeepSpeed's, by default that of its file `latest`.

    Raises:
        SpecInvalid: the folder contains neither.
        CheckpointUnsafe: a DeepSpeed file contains more than tensors, plain values and a few known classes.
    """
    if (folder / ".metadata").is_file():
        return Foreign(origin=folder, engine=DistributedState.name, world_size=1, copy=_dcp_copier(folder))
    latest = folder / "latest"
    named = tag or (latest.read_text().strip() if latest.is_file() else ".")
    tagged = folder / named
    if not tagged.resolve().is_relative_to(folder.resolve()):
        raise SpecInvalid(
            f"expected a tag that names a folder in {str(folder)!r}, found {named!r}: name that folder itself, or its tag "
            "with --tag"
        )
    files = sorted(tagged.glob("*.pt"))
    if not list(tagged.glob("*model_states.pt")):
        raise SpecInvalid(
            f"expected a checkpoint of DeepSpeed (<tag>/*model_states.pt) or of torch.distributed.checkpoint (.metadata) in "
            f"{str(folder)!r}, found {sorted(path.name for path in folder.glob('*'))[:8]!r}: name its folder, and --tag where "
            "there is no file `latest`"
        )
    for path in files:
        load_tensors(path, safe_classes(), mmap=True)
    ranks = [int(found[1]) for path in files if (found := _RANK.search(path.name))]
    return Foreign(
        origin=tagged,
        engine=DeepSpeedState.name,
        world_size=max(ranks, default=0) + 1,
        copy=_deepspeed_copier(files),
    )


def _deepspeed_copier(files: list[Path]) -> Callable[[Path, Write], None]:
    def copy(target: Path, write: Write) -> None:
        (target / DeepSpeedState.TAG).mkdir()
        for path in files:
            write(target / DeepSpeedState.TAG / path.name, load_tensors(path, safe_classes(), mmap=True))

    return copy


def _dcp_copier(folder: Path) -> Callable[[Path, Write], None]:
    def copy(target: Path, write: Write) -> None:
        state: dict[str, Any] = {}
        everything = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=everything, no_dist=True)
        ours = {name: state.pop(name) for name in ("model", "optimizer") if name in state}
        if "model" not in ours:
            raise SpecInvalid(
                f"expected the entries 'model' and 'optimizer' in the checkpoint {str(folder)!r}, found {sorted(state)!r}"
            )
        writer = ShardWriter(target, write)
        save({"optimizer": {}, **ours}, storage_writer=writer, planner=PlainSavePlanner(), no_dist=True)
        if writer.failure is not None:
            raise writer.failure
        rest = {name: value for name, value in state.items() if isinstance(value, dict | torch.Tensor)}
        TorchState.write_parts(target, write, rest)

    return copy
