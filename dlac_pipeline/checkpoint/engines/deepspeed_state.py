"""DeepSpeed engines, through their own save path."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlac_pipeline.checkpoint.engines.engine import Convert
from dlac_pipeline.checkpoint.engines.plain_state import plain_state
from dlac_pipeline.checkpoint.engines.safe_load import only_tensors
from dlac_pipeline.checkpoint.engines.universal import INFO, load_rest, loading_universal, safe_classes, to_universal
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, SpecInvalid, WorldSizeUnsupported
from dlac_pipeline.lakehouse.store_files import make_below


class DeepSpeedState:
    """A DeepSpeed engine (ZeRO 0-3): every rank saves its own shards through DeepSpeed's save path."""

    name = "deepspeed"
    TAG = "deepspeed"
    """Name of the folder of DeepSpeed's files in a checkpoint's folder."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def save(self, folder: Path, write: Write) -> None:
        """DeepSpeed's files, without its `latest` pointer, which is written before other ranks' shards are durable."""
        recorder = _recorder(folder, write)
        engine = self._engine
        has_info = engine.has_moe_layers or hasattr(engine.module, "universal_checkpoint_info")
        original, engine.checkpoint_engine = engine.checkpoint_engine, recorder
        # DeepSpeed's copy of its conversion script writes past the recorder, and raises before the barrier.
        engine._copy_recovery_script = lambda *_: None
        try:
            engine.save_checkpoint(str(folder), tag=self.TAG, client_state={} if has_info else INFO, save_latest=False)
        finally:
            engine.checkpoint_engine = original
            del engine._copy_recovery_script
        if recorder.failure is not None:
            raise recorder.failure

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load the shards of this rank, or its part of a converted checkpoint: tensors and a few known classes only."""
        converted = self.conversion(saved_world_size) is not None
        with only_tensors(folder, safe_classes()), loading_universal(self._engine) if converted else nullcontext():
            path, _ = self._engine.load_checkpoint(str(folder), tag=self.TAG)
        if path is None:
            raise CheckpointDamaged(
                f"expected a DeepSpeed checkpoint in {str(folder)!r}, DeepSpeed found none that it can load"
            )
        if converted:
            load_rest(self._engine, folder / self.TAG)

    def conversion(self, saved_world_size: int) -> Convert | None:
        """To a Universal Checkpoint, where ranks keep different shards. DeepSpeed converts no frozen parameters at ZeRO 3."""
        engine = self._engine
        if saved_world_size == dist.get_world_size() or not engine.save_zero_checkpoint:
            return None
        if engine.zero_optimization_partition_weights() and not all(
            p.requires_grad for p in engine.module.parameters()
        ):
            raise WorldSizeUnsupported(
                f"expected {saved_world_size} ranks, as when this ZeRO 3 checkpoint with frozen parameters was saved, found "
                f"{dist.get_world_size()}: resume with world_size = {saved_world_size}"
            )
        return self._convert

    def _convert(self, source: Path, target: Path) -> None:
        to_universal(source / self.TAG, target / self.TAG)

    def modules(self) -> Mapping[str, Any]:
        """Return the engine's module."""
        return {"engine": self._engine.module}

    def step_applied(self) -> bool:
        """False when DeepSpeed skipped the step because of an overflow."""
        return bool(self._engine.was_step_applied())


def skip_shared_memory_op() -> None:
    """Keep DeepSpeed, if the script imported it, from compiling its shared-memory all-reduce at the first start on a CPU.

    The build takes half a minute, a stale lock of a killed build hangs every later start, and only inference uses the op.
    """
    ops = sys.modules.get("deepspeed.ops")
    if ops is not None:
        ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _recorder(folder: Path, write: Write) -> Any:
    """Return a DeepSpeed checkpoint engine that passes on what is saved in the existing `folder`.

    A failure is kept for the vote, not raised: DeepSpeed's save ends in a barrier at which the other ranks wait.
    """
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class Recorder(CheckpointEngine):  # type: ignore[misc]  # deepspeed has no types
        def __init__(self) -> None:
            self.name = "dlac"
            self.failure: OSError | SpecInvalid | None = None

        def create(self, info: Any) -> None:
            """Do nothing. The folder exists."""

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            try:
                make_below(folder, Path(path))
            except OSError as err:
                self.failure = err

        def save(self, state_dict: Any, path: str) -> None:
            try:
                with torch.serialization.safe_globals(safe_classes()):
                    plain = plain_state(state_dict)
                write(Path(path), plain)
            except (OSError, SpecInvalid) as err:
                self.failure = err

        def load(self, path: str, map_location: Any = None) -> Any:
            raise NotImplementedError("expected DeepSpeed to save only")

        def commit(self, info: Any) -> bool:
            return True

    return Recorder()
