"""Checkpoints that others wrote: what they are, and their files as an engine of ours loads them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from dlac_pipeline.checkpoint.engines.deepspeed_state import DeepSpeedState
from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.engines.shards import INDEX, PlainSavePlanner, ShardWriter
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
    """Return the checkpoint of DeepSpeed, DCP or Hugging Face in `folder`. `tag` is DeepSpeed's, by default that of `latest`.

    Raises:
        SpecInvalid: the folder contains none of them.
        CheckpointUnsafe: a DeepSpeed file contains more than tensors, plain values and a few known classes.
    """
    if (folder / INDEX).is_file():
        raise SpecInvalid(
            f"expected a checkpoint that DLAC did not write, found one of its own in {str(folder)!r}: begin a run from it with "
            "dlac fork"
        )
    if (folder / ".metadata").is_file():
        return _of_dcp(folder, _read_dcp)
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
        if list(tagged.glob("*.safetensors")):
            return _of_dcp(tagged, _read_safetensors)
        raise SpecInvalid(
            f"expected a checkpoint of DeepSpeed (<tag>/*model_states.pt), torch.distributed.checkpoint (.metadata) or Hugging "
            f"Face (*.safetensors) in {str(folder)!r}, found {sorted(path.name for path in folder.glob('*'))[:8]!r}: name its "
            "folder, and --tag where there is no file `latest`"
        )
    for path in files:
        load_tensors(path, safe_classes(), mmap=True)
    ranks = [int(found[1]) for path in files if (found := _RANK.search(path.name))]
    return Foreign(
        origin=tagged,
        engine=DeepSpeedState.name,
        world_size=max(ranks, default=0) + 1,
        copy=partial(_copy_deepspeed, files),
    )


def _copy_deepspeed(files: list[Path], target: Path, write: Write) -> None:
    (target / DeepSpeedState.TAG).mkdir()
    for path in files:
        write(target / DeepSpeedState.TAG / path.name, load_tensors(path, safe_classes(), mmap=True))


def _of_dcp(folder: Path, read: Callable[[Path], dict[str, Any]]) -> Foreign:
    return Foreign(origin=folder, engine=DistributedState.name, world_size=1, copy=partial(_copy_dcp, folder, read))


def _copy_dcp(folder: Path, read: Callable[[Path], dict[str, Any]], target: Path, write: Write) -> None:
    state = read(folder)
    ours = {name: state.pop(name) for name in ("model", "optimizer") if name in state}
    if "model" not in ours:
        raise SpecInvalid(
            f"expected the entries 'model' and 'optimizer' in the checkpoint {str(folder)!r}, found {sorted(state)!r}"
        )
    writer = ShardWriter(target, write, adopted=True)
    save(ours, storage_writer=writer, planner=PlainSavePlanner(), no_dist=True)
    if writer.failure is not None:
        raise writer.failure
    rest = {name: value for name, value in state.items() if isinstance(value, dict | torch.Tensor)}
    TorchState.write_parts(target, write, rest)


def _read_dcp(folder: Path) -> dict[str, Any]:
    return _read(folder, FileSystemReader(folder))


def _read_safetensors(folder: Path) -> dict[str, Any]:
    """Return the tensors by part. They are those of a bare model, unless each name begins with that of a part."""
    tensors = _read(folder, HuggingFaceStorageReader(str(folder)))
    if (folder / "config.json").exists() or any(name.split(".")[0] not in ("model", "optimizer") for name in tensors):
        return {"model": tensors}
    parts: dict[str, Any] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts


def _read(folder: Path, reader: FileSystemReader) -> dict[str, Any]:
    state: dict[str, Any] = {}
    everything = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    try:
        _load_state_dict(state, storage_reader=reader, planner=everything, no_dist=True)
    except CheckpointException as err:
        cause, _ = err.failures[0]
        raise SpecInvalid(
            f"expected a whole checkpoint in {str(folder)!r}, found {type(cause).__name__}: {cause}; adopt another copy of it"
        ) from err
    return state
