"""Engine adapters: model, optimizer and schedule, into a checkpoint's folder and back.

An adapter saves what its rank owns, and loads from verified folders only. Durability and commit belong to the manager.
That of replicated models is here. Others enter through the door `dlac.engines`.
"""

import logging
import sys
from typing import Any

from torch.nn import Module

from dlac_pipeline.checkpoint.engines.engine import Engine
from dlac_pipeline.checkpoint.engines.torch_state import TorchState, reshard
from dlac_pipeline.lakehouse.errors import ScriptInvalid, SpecInvalid
from dlac_pipeline.spec.job_spec import ENGINES

__all__ = [
    "Engine",
    "TorchState",
    "adapt",
    "engine_named",
    "prepare_engines",
]

_log = logging.getLogger(__name__)
_OF_EXTENSIONS = frozenset(ENGINES.points())
"""Names of the engines of extensions. They are read once, in the process from which ranks are forked."""


def adapt(engine: Any, wanted: str = "auto", **parts: Any) -> Engine:
    """Return the adapter for a training script's state: an engine of a library, an adapter, or parts.

    An object of the package `deepspeed` has the adapter of this name, and so have other packages. `wanted` names the adapter
    of parts.

    Raise `ScriptInvalid` if it cannot be saved, `SpecInvalid` if the job spec's `checkpoint.engine` is another one.
    """
    if engine is not None and parts:
        raise SpecInvalid(
            f"expected run.restore(engine) or run.restore(model=..., optimizer=...), found both: {type(engine).__name__} "
            f"and {sorted(parts)!r}: put all parts into one"
        )
    if engine is None:
        return _made_for(parts, wanted)
    adapter = _adapter_of(engine)
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


def engine_named(name: str, *, setting: str = "the manifest's engine") -> type[Engine]:
    """Return the engine of a name. Raise `BadInput` as `Door.load` if none is installed that has it."""
    if name == TorchState.name:
        return TorchState
    found: type[Engine] = ENGINES.load(name, setting=setting, others=(TorchState.name,))
    return found


def prepare_engines() -> None:
    """Prepare this process for each engine of an extension whose library the script has imported.

    An engine that fails is only logged: the script may not use it.
    """
    for name in _OF_EXTENSIONS & sys.modules.keys():
        try:
            engine_named(name).prepare_process()
        except Exception as err:  # whatever an engine of others raises
            _log.warning("expected to prepare this process for the engine %r, found %s", name, err)


def _adapter_of(engine: Any) -> Engine:
    """Return the adapter of an object. The objects of a library's package have the adapter of its name."""
    package = type(engine).__module__.partition(".")[0]
    found: Engine = engine
    if not hasattr(type(engine), "step_applied") and package in ENGINES.points():
        named = engine_named(package)
        found = engine if named.writes_itself else named(engine)  # type: ignore[call-arg]  # as the protocol documents
    return found


def _made_for(parts: dict[str, Any], wanted: str) -> Engine:
    model = parts.get("model")
    if not parts:
        raise SpecInvalid(
            "expected a DeepSpeed engine in run.restore(engine), or parts such as model=model and optimizer=optimizer, "
            f"found {sorted(parts)!r}, with checkpoint.engine = {wanted!r}"
        )
    if wanted == "auto":
        wanted = "dcp" if isinstance(model, Module) and _is_sharded(model) else "torch"
    found = engine_named(wanted, setting="checkpoint.engine")
    if found.writes_itself:
        raise SpecInvalid(
            f"expected an engine of parts such as model=model, found checkpoint.engine = {wanted!r}, of which the script makes "
            'the object: restore that, or leave checkpoint.engine at "auto"'
        )
    return found(**parts)


def _is_sharded(model: Module) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    reshard(model)
    return any(isinstance(each, DTensor) for each in model.parameters())
