"""The files of a pipeline's layers, which DeepSpeed saves in place of a file of the model, and does not convert."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlac_pipeline.checkpoint.engines.engine import Weights
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.lakehouse.errors import WorldSizeUnsupported

_LAYER = re.compile(r"layer_(\d+)-model_states\.pt")


def check_stages(engine: Any, folder: Path) -> None:
    """Raise `WorldSizeUnsupported` if DeepSpeed's folder has another number of stages than the engine."""
    found = len([*folder.glob("mp_rank_*_model_states.pt")]) if _files(folder) else 1
    stages = getattr(engine, "num_stages", 1)
    if found != stages:
        raise WorldSizeUnsupported(
            f"expected {found} stages of the pipeline, as when this DeepSpeed checkpoint was saved, found {stages}: resume with "
            f"launch.mesh.pp = {found}"
        )


def copy(source: Path, target: Path) -> None:
    """Copy the files of layers into a conversion."""
    for path in _files(source).values():
        shutil.copyfile(path, target / path.name)


def load(module: Any, folder: Path, classes: Sequence[Any]) -> None:
    """Load the layers of this rank's stage, with their buffers and frozen parameters."""
    for index, layer in enumerate(module.forward_funcs):
        if hasattr(layer, "load_state_dict"):
            path = Path(module.ckpt_layer_path(str(folder), index))
            layer.load_state_dict(load_tensors(path, classes, mmap=True))


def weights_in(folder: Path, classes: Sequence[Any]) -> Weights:
    """Return the weights of all layers, by the names that they have in a PipelineModule. Empty: the folder has no layers."""
    return {
        f"{number}.{name}": weight
        for number, path in _files(folder).items()
        for name, weight in load_tensors(path, classes).items()
    }


def _files(folder: Path) -> dict[int, Path]:
    """Return the files of layers by number."""
    found = {path: _LAYER.fullmatch(path.name) for path in sorted(folder.glob("layer_*.pt"))}
    return {int(match[1]): path for path, match in found.items() if match}
