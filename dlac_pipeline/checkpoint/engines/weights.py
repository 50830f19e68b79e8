"""A checkpoint's weights, whole and alone, whichever engine saved them and however many ranks had them."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch

from catalog.errors import CheckpointError
from dlac_pipeline.checkpoint.engines.deepspeed_state import DeepSpeedState
from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, only_tensors
from dlac_pipeline.checkpoint.engines.shards import whole_tensors
from dlac_pipeline.checkpoint.engines.torch_state import TorchState
from dlac_pipeline.checkpoint.engines.universal import safe_classes

Weights = dict[str, torch.Tensor]


def weights_of(engine: str, folder: Path, *, part: str = "model") -> Weights:
    """Name -> tensor in host memory of the checkpoint that `engine` saved in `folder`; `part` where there are several models.

    DeepSpeed's are those of its optimizer where it has any in full precision.

    Raises:
        CheckpointError: there is no such part, or no such engine.
        CheckpointUnsafe: there is more in a file than tensors and plain values.
    """
    if engine not in _READERS:
        raise CheckpointError(f"expected a checkpoint of one of the engines {sorted(_READERS)!r}, found {engine!r}")
    found = _READERS[engine](folder, part)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def _of_torch(folder: Path, part: str) -> Weights:
    parts = TorchState.parts_in(folder)
    if part not in parts:
        raise CheckpointError(f"expected a part named {part!r} in the checkpoint, found {sorted(parts)!r}")
    return {name: value for name, value in parts[part].items() if isinstance(value, torch.Tensor)}


def _of_shards(folder: Path, part: str) -> Weights:
    found = whole_tensors(folder, part)
    if not found:
        raise CheckpointError(f"expected a part named {part!r} in the checkpoint, found none: its weights are 'model'")
    return found


def _of_deepspeed(folder: Path, part: str) -> Weights:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    files = folder / DeepSpeedState.TAG
    if not list(files.glob("*_optim_states.pt")):
        module: Weights = load_tensors(files / "mp_rank_00_model_states.pt", safe_classes())["module"]
        return module
    with only_tensors(files, safe_classes()), redirect_stdout(io.StringIO()):
        full: Weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=DeepSpeedState.TAG)
    return full


_READERS: dict[str, Callable[[Path, str], Weights]] = {
    TorchState.name: _of_torch,
    DistributedState.name: _of_shards,
    DeepSpeedState.name: _of_deepspeed,
}
