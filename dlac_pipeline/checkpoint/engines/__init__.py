"""Engine adapters: model, optimizer and schedule, into a checkpoint's folder and back.

An adapter saves what its rank owns, and loads from verified folders only. Durability and commit belong to the manager.
"""

import sys
from typing import Any

from torch.nn import Module

from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.engines.torch_state import TorchState
from dlac_pipeline.checkpoint.engines.trainer_files import TrainerFiles
from dlac_pipeline.extensions.deepspeed.deepspeed_state import DeepSpeedState, skip_shared_memory_op
from dlac_pipeline.lakehouse.errors import ScriptInvalid, SpecInvalid

__all__ = ["Engine", "TorchState", "TrainerFiles", "adapt", "skip_shared_memory_op"]


def adapt(engine: Any, wanted: str = "auto", **parts: Any) -> Engine:
    """Return the adapter for what a training script holds: a DeepSpeed engine, an adapter, or parts for which `wanted` names one.

    Raise `ScriptInvalid` if it cannot be saved, `SpecInvalid` if the job spec's `checkpoint.engine` is another one.
    """
    if engine is not None and parts:
        raise SpecInvalid(
            f"expected run.restore(engine) or run.restore(model=..., optimizer=...), found both: {type(engine).__name__} "
            f"and {sorted(parts)!r}: put all parts into one"
        )
    if engine is None:
        return _made_for(parts, wanted)
    adapter: Engine = DeepSpeedState(engine) if type(engine).__module__.startswith("deepspeed.") else engine
    if not hasattr(adapter, "step_applied"):
        raise ScriptInvalid(
            f"expected a DeepSpeed engine or an adapter in run.restore(engine), found {type(engine).__name__!r}: wrap it, as in "
            "run.restore(dlac_pipeline.TorchState(model=model, optimizer=optimizer)), or name the parts, as in "
            "run.restore(model=model, optimizer=optimizer)"
        )
    if wanted not in ("auto", adapter.name):
        raise SpecInvalid(
            f"expected the engine that the job spec names, checkpoint.engine = {wanted!r}, found that the script restores "
            f'{adapter.name!r}: change one of them, or leave checkpoint.engine at "auto"'
        )
    return adapter


def _made_for(parts: dict[str, Any], wanted: str) -> Engine:
    model = parts.get("model")
    if wanted == "deepspeed" or not parts:
        raise SpecInvalid(
            f"expected a DeepSpeed engine in run.restore(engine), or parts such as model=model and optimizer=optimizer, "
            f"found {sorted(parts)!r}, with checkpoint.engine = {wanted!r}"
        )
    if wanted == "dcp" or (wanted == "auto" and isinstance(model, Module) and _is_sharded(model)):
        from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState  # imports DCP: a second

        return DistributedState(**parts)
    return TorchState(**parts)


def _is_sharded(model: Module) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(each, DTensor) for each in model.parameters())
