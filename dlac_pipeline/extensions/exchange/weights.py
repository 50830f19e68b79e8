"""A checkpoint's weights, whole and alone, from any engine and any number of ranks."""

from pathlib import Path

from dlac_pipeline.checkpoint.engines import engine_named
from dlac_pipeline.checkpoint.engines.engine import Weights
from dlac_pipeline.checkpoint.engines.model_names import WRAPPERS, unwrapped_name
from dlac_pipeline.lakehouse.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
"""Name that Hugging Face's libraries give a model's weights in one file."""
WEIGHTS_INDEX = f"{WEIGHTS_FILE}.index.json"
"""Name of the index of weights in several files."""


def weights_of(engine: str, folder: Path, *, part: str = "model") -> Weights:
    """Return name -> tensor in host memory of the checkpoint that `engine` saved in `folder`.

    `part` selects one of several models. Names are the bare model's: without the prefixes of DDP, FSDP,
    `torch.compile` or activation checkpointing. DeepSpeed's tensors come from its optimizer where it has them in full
    precision. Raise `BadInput` if the engine is not installed, `CheckpointError` if it exports no weights or the part does not
    exist, `CheckpointUnsafe` as `load_tensors`.
    """
    bare: Weights = {}
    for name, tensor in engine_named(engine).weights_in(folder, part).items():
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
    parts = {"model": model, "optimizer": engine_named(engine).optimizer_in(folder, model, scratch)}
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
