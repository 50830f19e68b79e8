"""Which adapter saves and loads the state: what the script restores, and what the job spec says of it."""

from __future__ import annotations

import pytest
import torch

from dlac_pipeline.checkpoint.engines import TorchState, adapt
from dlac_pipeline.checkpoint.engines.distributed_state import DistributedState
from dlac_pipeline.lakehouse.errors import SpecInvalid


def parts() -> dict[str, object]:
    """A model and its optimizer."""
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


@pytest.mark.parametrize(("wanted", "kind"), [("auto", TorchState), ("torch", TorchState), ("dcp", DistributedState)])
def test_parts_get_the_adapter_that_the_spec_names(wanted: str, kind: type) -> None:
    """A model that is not sharded is replicated, unless DCP is asked for."""
    assert isinstance(adapt(None, wanted, **parts()), kind)


def test_adapter_must_match_spec() -> None:
    """The same name, or "auto"."""
    mine = TorchState(**parts())
    assert adapt(mine) is adapt(mine, "torch") is mine
    with pytest.raises(SpecInvalid, match=r"checkpoint\.engine = 'deepspeed', found that the script restores 'torch'"):
        adapt(mine, "deepspeed")


def test_what_is_no_engine_is_refused() -> None:
    """Nothing at all, parts for DeepSpeed, or an engine and parts."""
    for engine, wanted, given in ((None, "auto", {}), (None, "deepspeed", parts()), (TorchState(), "auto", parts())):
        with pytest.raises(SpecInvalid, match=r"run\.restore"):
            adapt(engine, wanted, **given)
