"""The choice of the adapter of a state. A replicated one is loaded from a mapped file, which may be written afterwards."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlac_pipeline.checkpoint.engines import TorchState, adapt
from dlac_pipeline.checkpoint.rng import load_rng, save_rng, seed_rng
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.extensions.sharded.distributed_state import DistributedState
from dlac_pipeline.lakehouse.errors import SpecInvalid


class _Keeps:
    """A part that keeps the tensors that it is given."""

    def __init__(self) -> None:
        self.kept: Any = {"mean": torch.rand(50_000)}

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


class _KeepsExtra(torch.nn.Linear):
    """A module that does so with its extra state."""

    def __init__(self) -> None:
        super().__init__(300, 300)
        self.extra = torch.rand(50_000)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


def _parts() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 300)).mean().backward()
    optimizer.step()
    patched = torch.nn.Linear(300, 300)
    vars(patched)["load_state_dict"] = partial(patched.load_state_dict, assign=True)
    modules = {"model": model, "plain": torch.nn.Linear(300, 300), "odd": _KeepsExtra(), "patched": patched}
    return {**modules, "optimizer": optimizer, "own": _Keeps()}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in values for tensor in _tensors(each)]


@pytest.mark.parametrize("swaps", [False, True])
def test_no_part_keeps_the_file(tmp_path: Path, swaps: bool) -> None:
    """Modules copy their weights, and all others get copies: a later write to the file changes nothing."""
    saved, loaded = _parts(), _parts()
    TorchState(**saved).save(tmp_path, lambda path, state: torch.save(state, path))
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        TorchState(**loaded).load(tmp_path, saved_world_size=1)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    for name, part in saved.items():
        expected, found = _tensors(part.state_dict()), _tensors(loaded[name].state_dict())
        assert len(expected) == len(found) > 0
        assert all(map(torch.equal, expected, found)), name


def draw() -> list[float]:
    """Draw the next number of each generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_frozen_weights_have_own_file(tmp_path: Path) -> None:
    """Parts keep their order. A memory state may have such a file from before the weights thawed, which is not read."""
    model = torch.nn.Sequential(torch.nn.Linear(600, 600).requires_grad_(False), torch.nn.Linear(600, 1))
    for step in ("1", "2"):
        (tmp_path / step).mkdir()
        TorchState(model=model, twin=model[0]).save(tmp_path / step, Direct().write)
        model.requires_grad_(True)
    frozen, thawed = (TorchState.parts_in(tmp_path / step) for step in ("1", "2"))
    (tmp_path / "1" / "torch-frozen.pt").rename(tmp_path / "2" / "torch-frozen.pt")
    assert [*TorchState.parts_in(tmp_path / "2")["model"]] == [*frozen["model"]] == [*model.state_dict()]
    assert all(map(torch.equal, _tensors(frozen), _tensors(thawed)))


def test_generators_resume_where_saved(tmp_path: Path) -> None:
    """Each generator resumes, whatever was drawn between the save and the restore."""
    seed_rng(1, 2, 3)
    save_rng(tmp_path, 0, Direct().write)
    expected = draw()
    assert draw() != expected
    load_rng(tmp_path, 0)
    assert draw() == expected


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
    with pytest.raises(SpecInvalid, match="of which the script makes the object"):
        adapt(None, "files", **parts())


@pytest.mark.parametrize(("engine", "kind"), [("auto", TorchState), ("torch", TorchState), ("dcp", DistributedState)])
def test_spec_chooses_adapter(engine: str, kind: type) -> None:
    """An unsharded model is replicated, unless the spec names DCP."""
    assert isinstance(adapt(None, engine, **parts()), kind)
