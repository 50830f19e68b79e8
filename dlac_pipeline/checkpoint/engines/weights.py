"""A checkpoint's weights, whole and alone, whichever engine saved them and however many ranks had them."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch

from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
from dlac_pipeline.checkpoint.engines.model_names import WRAPPERS, unwrapped_name
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, only_tensors
from dlac_pipeline.checkpoint.engines.shards import ShardReader, whole_tensors
from dlac_pipeline.checkpoint.engines.torch_state import TorchState
from dlac_pipeline.extensions.deepspeed.deepspeed_state import DeepSpeedState, moments_in, safe_classes, to_universal
from dlac_pipeline.lakehouse.errors import CheckpointError

Weights = dict[str, torch.Tensor]
WEIGHTS_FILE = "model.safetensors"
"""Name that Hugging Face's libraries give a model's weights in one file."""
WEIGHTS_INDEX = f"{WEIGHTS_FILE}.index.json"
"""Name of the index of weights in several files."""


def weights_of(engine: str, folder: Path, *, part: str = "model") -> Weights:
    """Return name -> tensor in host memory of the checkpoint that `engine` saved in `folder`.

    `part` selects one of several models. Names are those of the bare model: without the prefixes of DDP, FSDP,
    `torch.compile` or activation checkpointing. DeepSpeed's tensors are those of its optimizer where it has them in full
    precision. Raise `CheckpointError` if the part or the engine does not exist, `CheckpointUnsafe` as `load_tensors`.
    """
    if engine not in _READERS:
        raise CheckpointError(f"expected a checkpoint of one of the engines {sorted(_READERS)!r}, found {engine!r}")
    found = _READERS[engine](folder, part)
    bare: Weights = {}
    for name, tensor in found.items():
        unwrapped = unwrapped_name(name)
        if unwrapped in bare:
            raise CheckpointError(
                f"expected tensors of different names without {sorted(WRAPPERS)!r}, found {unwrapped!r} twice: save the model "
                "without what wraps it"
            )
        bare[unwrapped] = tensor.detach().cpu().contiguous()
    return bare


def state_of(engine: str, folder: Path, *, scratch: Path) -> Weights:
    """Return the tensors of model and optimizer by the names that `DistributedState` gives them.

    A ZeRO checkpoint is converted in the folder `scratch` first. Raises as `weights_of`.
    """
    model = weights_of(engine, folder)
    optimizer: Weights = {}
    if engine == DistributedState.name:
        # The script has the optimizer's settings.
        names = ShardReader(folder).index["values"]
        values = [name for name in names if not name.startswith("optimizer.param_groups.")]
        if values:
            raise CheckpointError(
                f"expected tensors only in the state of model and optimizer, found {len(values)} plain values, such as "
                f"{values[0]!r}, which safetensors cannot contain: export its weights with dlac checkpoint export"
            )
        optimizer = whole_tensors(folder, "optimizer")
    elif engine == DeepSpeedState.name and list((folder / DeepSpeedState.TAG).glob("*_optim_states.pt")):
        to_universal(folder / DeepSpeedState.TAG, scratch / "universal")
        optimizer = moments_in(scratch / "universal", model)
    else:
        raise CheckpointError(
            f"expected a checkpoint of DistributedState or of DeepSpeed at ZeRO 1 to 3, found one of {engine!r}, whose optimizer "
            "does not know the names of parameters: export its weights with dlac checkpoint export"
        )
    parts = {"model": model, "optimizer": optimizer}
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


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
    whole = files / "mp_rank_00_model_states.pt"  # not at ZeRO 3
    module: Weights = load_tensors(whole, safe_classes())["module"] if whole.exists() else {}
    if not list(files.glob("*_optim_states.pt")):
        return module
    with only_tensors(files, safe_classes()), redirect_stdout(io.StringIO()):
        full: Weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=DeepSpeedState.TAG)
    return {**module, **full}  # at ZeRO 1 `full` lacks frozen parameters


_READERS: dict[str, Callable[[Path, str], Weights]] = {
    TorchState.name: _of_torch,
    DistributedState.name: _of_shards,
    DeepSpeedState.name: _of_deepspeed,
}
