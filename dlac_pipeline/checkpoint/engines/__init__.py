"""Engine adapters: how model, optimizer and schedule get into a checkpoint's folder and back.

An adapter saves what its rank owns and says which files it wrote; that they are durable, complete and committed is not its
business. It is only ever handed a folder whose digests hold.
"""

from __future__ import annotations

from typing import Any

from dlac_pipeline.checkpoint.engines.deepspeed_state import DeepSpeedState, skip_shared_memory_op
from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.engines.torch_state import TorchState

__all__ = ["DistributedState", "Engine", "TorchState", "adapt", "skip_shared_memory_op"]


def adapt(engine: Any) -> Engine:
    """The adapter for what a training script holds: a DeepSpeed engine, or an adapter such as `TorchState`."""
    if type(engine).__module__.startswith("deepspeed."):
        return DeepSpeedState(engine)
    adapter: Engine = engine
    return adapter
