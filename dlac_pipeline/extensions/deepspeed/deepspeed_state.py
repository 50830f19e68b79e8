"""DeepSpeed engines, through their own save path, and Universal Checkpoints: ZeRO ones for another number of ranks.

DeepSpeed converts and loads most of a Universal Checkpoint. Buffers and frozen parameters are loaded here, and at ZeRO 3 the
settings of parameter groups after the first.
"""

import io
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlac_pipeline.checkpoint.engines.engine import Convert, Engine, Foreign, Weights
from dlac_pipeline.checkpoint.engines.model_names import unwrapped_name
from dlac_pipeline.checkpoint.engines.rank_buffers import load_buffers, save_buffers
from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, only_tensors, plain_state
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.extensions.deepspeed import layers
from dlac_pipeline.lakehouse.errors import (
    BadInput,
    CheckpointDamaged,
    CheckpointError,
    SpecInvalid,
    WorldSizeUnsupported,
)
from dlac_pipeline.lakehouse.store_files import make_below

_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""Facts that a checkpoint must contain to be converted."""

_CONVERTED = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""Parts of an optimizer's state that DeepSpeed converts."""

_RANK = re.compile(r"zero_pp_rank_(\d+)_")


class DeepSpeedState(Engine):
    """A DeepSpeed engine (ZeRO 0-3): every rank saves its shards through DeepSpeed's save path."""

    name = "deepspeed"
    loads_own_files = True
    foreign_layout = "DeepSpeed (<tag>/*model_states.pt)"
    TAG = "deepspeed"
    """Name of the folder of DeepSpeed's files in a checkpoint's folder."""

    def __init__(self, engine: Any = None, **parts: Any) -> None:
        """Raise `SpecInvalid` for parts, which the engine has in it."""
        if engine is None:
            raise SpecInvalid(
                f"expected a DeepSpeed engine in run.restore(engine), found the parts {sorted(parts)!r}, with "
                f"checkpoint.engine = {self.name!r}: pass what deepspeed.initialize returned"
            )
        self._engine = engine
        # another rank of a stage has saved the layers of this one
        self.loads_own_files = not hasattr(engine, "num_stages")

    def save(self, folder: Path, write: Write) -> None:
        """DeepSpeed's files, without its `latest` pointer, which is written before other ranks' shards are durable."""
        recorder = make_recorder(folder, write)
        engine = self._engine
        has_info = engine.has_moe_layers or hasattr(engine.module, "universal_checkpoint_info")
        original, engine.checkpoint_engine = engine.checkpoint_engine, recorder
        # DeepSpeed's copy of its conversion script writes past the recorder, and raises before the barrier.
        engine._copy_recovery_script = lambda *_: None
        try:
            engine.save_checkpoint(str(folder), tag=self.TAG, client_state={} if has_info else _INFO, save_latest=False)
        finally:
            engine.checkpoint_engine = original
            del engine._copy_recovery_script
        if recorder.failure is not None:
            raise recorder.failure
        save_buffers(folder, self.modules(), write)

    def load(self, folder: Path, *, saved_world_size: int) -> None:
        """Load the shards of this rank, or its part of a converted checkpoint: tensors and a few known classes only."""
        layers.check_stages(self._engine, folder / self.TAG)
        converted = self.conversion(saved_world_size) is not None
        with only_tensors(folder, safe_classes()), _loading_universal(self._engine) if converted else nullcontext():
            path, _ = self._engine.load_checkpoint(str(folder), tag=self.TAG)
        if path is None:
            raise CheckpointDamaged(f"expected a checkpoint in {str(folder)!r}, DeepSpeed found none that it can load")
        if converted:
            _load_rest(self._engine, folder / self.TAG)
        load_buffers(folder, self.modules(), saved_world_size=saved_world_size)

    def conversion(self, saved_world_size: int) -> Convert | None:
        """Conversion to a Universal Checkpoint, for ranks with new shards. DeepSpeed converts no frozen parameters at ZeRO 3."""
        engine = self._engine
        if saved_world_size == dist.get_world_size() or not engine.save_zero_checkpoint:
            return None
        is_frozen = not all(each.requires_grad for each in engine.module.parameters())
        if engine.zero_optimization_partition_weights() and is_frozen:
            raise WorldSizeUnsupported(
                f"expected {saved_world_size} ranks, as when this ZeRO 3 checkpoint with frozen parameters was saved, found "
                f"{dist.get_world_size()}: resume with world_size = {saved_world_size}"
            )
        return lambda source, target: to_universal(source / self.TAG, target / self.TAG)

    def modules(self) -> Mapping[str, Any]:
        """Return the engine's module."""
        return {"engine": self._engine.module}

    def step_applied(self) -> bool:
        """False when DeepSpeed skipped the step because of an overflow."""
        return bool(self._engine.was_step_applied())

    @classmethod
    def prepare_process(cls) -> None:
        """Keep DeepSpeed, if the script imported it, from compiling its shared-memory all-reduce at the first start on a CPU.

        The build takes half a minute, a stale lock of a killed build hangs every later start, and only inference uses the op.
        """
        ops = sys.modules.get("deepspeed.ops")
        if ops is not None:
            ops.__compatible_ops__["deepspeed_shm_comm"] = False

    @classmethod
    def safe_classes(cls) -> list[Any]:
        """Return the classes that DeepSpeed's files have in them. Raise `BadInput` if DeepSpeed is not installed."""
        return safe_classes()

    @classmethod
    def weights_in(cls, folder: Path, part: str) -> Weights:
        """Return the weights of the only part, in full precision where the optimizer has them so."""
        files, classes = folder / cls.TAG, safe_classes()
        if found := layers.weights_in(files, classes):
            return found
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = files / "mp_rank_00_model_states.pt"  # not at ZeRO 3
        module: Weights = load_tensors(whole, classes)["module"] if whole.exists() else {}
        if not list(files.glob("*_optim_states.pt")):
            return module
        with only_tensors(files, classes), redirect_stdout(io.StringIO()):
            full: Weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=cls.TAG)
        return {**module, **full}  # at ZeRO 1 `full` lacks frozen parameters

    @classmethod
    def optimizer_in(cls, folder: Path, model: Weights, scratch: Path) -> Weights:
        """Return the moments, from a conversion. Raise `CheckpointError` at ZeRO 0, which numbers the parameters."""
        if not list((folder / cls.TAG).glob("*_optim_states.pt")):
            return super().optimizer_in(folder, model, scratch)
        to_universal(folder / cls.TAG, scratch / "universal")
        return moments_in(scratch / "universal", model)

    @classmethod
    def foreign(cls, folder: Path) -> Foreign | None:
        """Return what DeepSpeed saved in the folder of a tag, or None. Raise `CheckpointUnsafe` as `load_tensors`."""
        files = sorted(folder.glob("*.pt"))
        if not list(folder.glob("*model_states.pt")):
            return None
        for path in files:
            load_tensors(path, safe_classes(), mmap=True)
        ranks = [int(found[1]) for path in files if (found := _RANK.search(path.name))]
        return Foreign(
            origin=folder,
            engine=cls.name,
            world_size=max(ranks, default=0) + 1,
            files=[],
            copy=partial(cls._copy, files),
        )

    @classmethod
    def _copy(cls, files: list[Path], target: Path, write: Write) -> None:
        (target / cls.TAG).mkdir()
        for path in files:
            write(target / cls.TAG / path.name, load_tensors(path, safe_classes(), mmap=True))


def make_recorder(folder: Path, write: Write) -> Any:
    """Return a DeepSpeed checkpoint engine that passes on the files of the existing `folder`.

    A failure is kept for the vote, not raised: DeepSpeed's save ends in a barrier at which all ranks wait.
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


def safe_classes() -> list[Any]:
    """Return the classes of DeepSpeed's files. Their constructors do nothing. Raises as its method."""
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError as err:
        raise BadInput(
            f'expected the package deepspeed to read its files, found {err}: pip install "dlac-pipeline[deepspeed]"'
        ) from err
    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def to_universal(source: Path, target: Path) -> None:
    """Convert DeepSpeed's folder `source`, in this process, so that the conversion ends with it. Raises as `only_tensors`.

    Raise `WorldSizeUnsupported` if DeepSpeed does not know how to convert this.
    """
    from deepspeed.checkpoint import ds_to_universal

    _check_moments(source)
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
            layers.copy(source, target)
        except (AssertionError, ArithmeticError, KeyError, IndexError, ValueError, NotImplementedError) as err:
            raise WorldSizeUnsupported(
                f"expected a DeepSpeed checkpoint in {str(source)!r} that can be converted to another number of ranks, "
                f"DeepSpeed found {type(err).__name__}: {err}; resume with the number of ranks that saved it"
            ) from err


def _check_moments(folder: Path) -> None:
    """Raise `WorldSizeUnsupported` if an optimizer's state has more than DeepSpeed's conversion keeps of it."""
    for path in sorted(folder.glob("*_optim_states.pt")):
        saved = load_tensors(path, safe_classes(), mmap=True)["optimizer_state_dict"]
        own = saved.get("base_optimizer_state", saved.get("optimizer_state_dict", {}))
        kept = own.get("state", {}).values() if isinstance(own, dict) else own
        if lost := sorted({key for each in kept for key in each} - _CONVERTED):
            raise WorldSizeUnsupported(
                f"expected {sorted(_CONVERTED)!r} in the state of the optimizer, which DeepSpeed converts to another number of "
                f"ranks, found {lost!r} too: resume with the number of ranks that saved it"
            )


@contextmanager
def _loading_universal(engine: Any) -> Iterator[None]:
    """While inside, `engine.load_checkpoint` takes converted checkpoints."""
    before, engine._config.load_universal_checkpoint = engine._config.load_universal_checkpoint, True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


def _load_rest(engine: Any, folder: Path) -> None:
    """Load what DeepSpeed's load of a converted checkpoint leaves unchanged."""
    with _loading_universal(engine):
        names = engine._get_all_ckpt_names(str(folder.parent), folder.name)
    state = load_tensors(Path(names[engine.checkpoint_mp_rank]), safe_classes(), mmap=True)
    if state["module"] is None:
        layers.load(engine.module, folder, safe_classes())
        return
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
    """Return the optimizer's tensors of each parameter in a converted checkpoint, by the names of `get_state_dict`.

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
