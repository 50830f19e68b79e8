"""DeepSpeed Universal Checkpoint: a ZeRO checkpoint divided by parameter, for another number of ranks.

DeepSpeed's own conversion and load do most of it. What they leave out is done here: buffers and frozen parameters, and at
ZeRO 3 the settings of parameter groups after the first.
"""

import io
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, only_tensors
from dlac_pipeline.checkpoint.engines.torch_state import unwrapped_name
from dlac_pipeline.lakehouse.errors import CheckpointError, WorldSizeUnsupported

INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""Facts that a checkpoint must contain to be converted."""


def safe_classes() -> list[Any]:
    """The classes that DeepSpeed's files have in them, none of which does anything when it is made."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def to_universal(source: Path, target: Path) -> None:
    """Convert DeepSpeed's folder `source`, in this process, so that the conversion ends with it. Raises as `only_tensors`.

    Raise `WorldSizeUnsupported` if DeepSpeed does not know how to convert this.
    """
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # more would fork a process that has threads
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with only_tensors(source, safe_classes()), redirect_stdout(io.StringIO()):
        try:
            ds_to_universal.main(options)
        except (AssertionError, KeyError, IndexError, ValueError, NotImplementedError) as err:
            raise WorldSizeUnsupported(
                f"expected a DeepSpeed checkpoint in {str(source)!r} that can be converted to another number of ranks, "
                f"DeepSpeed found {type(err).__name__}: {err}; resume with the number of ranks that saved it"
            ) from err


@contextmanager
def loading_universal(engine: Any) -> Iterator[None]:
    """While inside, `engine.load_checkpoint` takes converted checkpoints."""
    before, engine._config.load_universal_checkpoint = engine._config.load_universal_checkpoint, True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


def load_rest(engine: Any, folder: Path) -> None:
    """Load what DeepSpeed's load of a converted checkpoint leaves unchanged."""
    with loading_universal(engine):
        names = engine._get_all_ckpt_names(str(folder.parent), folder.name)
    state = load_tensors(Path(names[engine.checkpoint_mp_rank]), safe_classes(), mmap=True)
    wanted = set(state["buffer_names"])
    if not engine.zero_optimization_partition_weights():
        trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
        wanted |= state["module"].keys() - trained
    engine.module.load_state_dict({name: state["module"][name] for name in wanted}, strict=False)
    if engine.zero_optimization_partition_weights():  # DeepSpeed gave every parameter group the settings of the first
        optimizer = load_tensors(folder / "zero" / "optimizer_state.pt", safe_classes(), mmap=True)
        saved = optimizer["optimizer_state_dict"]["param_groups"]
        for group, settings in zip(engine.optimizer.param_groups, saved, strict=True):
            group.update({name: value for name, value in settings.items() if name != "params"})


def moments_in(folder: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the optimizer of a converted checkpoint keeps of each parameter, by the names of `get_state_dict`.

    Raise `CheckpointError` if groups of parameters differ in their steps, because the parameters of each are unknown.
    """
    found: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "zero").glob("*/*.pt")):
        name, key = unwrapped_name(path.parent.name), path.stem
        if key == "fp32":
            continue
        value = load_tensors(path, safe_classes())
        tensor = torch.as_tensor(value["param"] if isinstance(value, dict) else value)
        found[f"state.{name}.{key}"] = tensor if key == "step" else tensor.reshape(weights[name].shape)
    common = load_tensors(folder / "zero" / "optimizer_state.pt", safe_classes()).get("optimizer_state_dict")
    if common is not None:  # ZeRO 3, which keeps the step of a group only
        steps = {float(group["step"]) for group in common["state"].values() if "step" in group}
        if len(steps) > 1:
            raise CheckpointError(f"expected one step of all parameters in the checkpoint, found {sorted(steps)!r}")
        trained = {name.rpartition(".")[0] for name in found}
        found |= {f"{name}.step": torch.tensor(step) for name in trained for step in steps}
    return found
