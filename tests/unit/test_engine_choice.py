"""The choice of the adapter that saves and loads the state, by the restored objects and the job spec."""

from __future__ import annotations

import pytest
import torch

from dlac_pipeline.checkpoint.engines import TorchState, adapt
from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
from dlac_pipeline.lakehouse.errors import SpecInvalid


def parts() -> dict[str, object]:
    """Return a model and its optimizer."""
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


def test_adapter_must_match_spec() -> None:
    """The adapter's name equals the spec's, or the spec has "auto"."""
    mine = TorchState(**parts())
    assert adapt(mine) is adapt(mine, "torch") is mine
    with pytest.raises(SpecInvalid, match=r"checkpoint\.engine = 'deepspeed', found that the script restores 'torch'"):
        adapt(mine, "deepspeed")


def test_invalid_engine_is_refused() -> None:
    """An empty call, parts for DeepSpeed, and an engine together with parts are refused."""
    for engine, name, given in ((None, "auto", {}), (None, "deepspeed", parts()), (TorchState(), "auto", parts())):
        with pytest.raises(SpecInvalid, match=r"run\.restore"):
            adapt(engine, name, **given)


@pytest.mark.parametrize(("engine", "kind"), [("auto", TorchState), ("torch", TorchState), ("dcp", DistributedState)])
def test_spec_chooses_adapter(engine: str, kind: type) -> None:
    """An unsharded model is replicated, unless the spec names DCP."""
    assert isinstance(adapt(None, engine, **parts()), kind)
