"""Buffers that differ between ranks, such as the running mean of a BatchNorm that nothing synchronizes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlac_pipeline.checkpoint.engines.model_names import bare_names
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.stage.copies import Write


def save_buffers(folder: Path, parts: Mapping[str, Any], write: Write) -> None:
    """Save this rank's buffers, if other ranks exist. The state has the buffers of one rank only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buffers = {name: dict(_buffers_of(part)) for name, part in parts.items()}
    if any(buffers.values()):
        write(_file(folder, dist.get_rank()), buffers)


def load_buffers(folder: Path, parts: Mapping[str, Any], *, saved_world_size: int) -> None:
    """Set this rank's buffers to its saved ones. With more ranks than saved, ranks begin again at the first one's."""
    rank = dist.get_rank() % saved_world_size if dist.is_initialized() else 0
    if not _file(folder, rank).exists():
        return
    saved = load_tensors(_file(folder, rank))
    for name, part in parts.items():
        for buffer_name, buffer in _buffers_of(part):
            if buffer_name in saved.get(name, {}):
                buffer.copy_(saved[name][buffer_name])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"buffers-{rank:05d}.pt"


def saved_buffers(part: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module that its state has, by their names in the bare model."""
    buffers = dict(part.named_buffers())
    if buffers:
        # activation checkpointing leaves its wrapper out of these names only
        saved = set(bare_names(part, part.state_dict()).values())
        yield from ((bare, buffers[name]) for name, bare in bare_names(part, buffers).items() if bare in saved)


def _buffers_of(part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the saved buffers of a part that no wrapper makes equal on all ranks."""
    if not isinstance(part, torch.nn.Module):
        return
    wrapped = [module for module in part.modules() if isinstance(module, DistributedDataParallel)]
    equal = {id(buffer) for module in wrapped if module.broadcast_buffers for buffer in module.buffers()}
    yield from ((name, buffer) for name, buffer in saved_buffers(part) if id(buffer) not in equal)
