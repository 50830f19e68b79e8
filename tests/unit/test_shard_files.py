"""Files of sharded state: tensors of every kind are restored bit for bit, each from the file that can contain it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dlac_pipeline import DistributedState
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct, Writer
from dlac_pipeline.checkpoint.stage.streamed_file import DTYPES
from dlac_pipeline.extensions.exchange.weights import state_of, weights_of
from dlac_pipeline.lakehouse.errors import CheckpointError

TENSORS = "shard-00001-model-00001-of-00001.safetensors"
OTHER_TYPES = (torch.complex128, torch.float8_e8m0fnu)
"""Types of elements that the format of safetensors does not have."""


class Unusual(nn.Module):
    """A model with tensors of all types and forms, filled with `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), value))
        self.tied = self.weight
        self.frozen = nn.Parameter(torch.full((2,), value, dtype=torch.float16), requires_grad=False)
        forms = {
            "scalar": torch.tensor(value),
            "empty": torch.empty(0, 4),
            "transposed": (torch.arange(12.0) + value).reshape(3, 4).t(),
            "strided": (torch.arange(20.0) + value)[::3],
            "conjugate": torch.full((2,), complex(value, 1.0), dtype=torch.complex64).conj(),
            "negative": torch.full((2,), complex(1.0, value), dtype=torch.complex64).conj().imag,
        }
        types = {
            str(dtype).removeprefix("torch."): torch.full((3,), value).to(dtype) for dtype in (*DTYPES, *OTHER_TYPES)
        }
        whole = torch.arange(10.0) + value
        overlapping = {"first": whole[:6], "last": whole[4:]}
        for name, tensor in {**forms, **types, **overlapping}.items():
            self.register_buffer(f"{name}_", tensor)


def state_bytes(model: nn.Module) -> dict[str, tuple[Any, bytes]]:
    """Return type, shape and content of each tensor."""
    found = {}
    for name, tensor in model.state_dict().items():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        found[name] = ((tensor.dtype, tensor.shape), plain.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.parametrize("plan", ["new", "of the last save"])
@pytest.mark.parametrize("writing", ["direct", "copies"])
def test_unusual_tensors_are_restored_exactly(
    tmp_path: Path, writing: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also tied ones, views and complex numbers. Those of other types are in the second file, and can be exported."""
    writer: Writer = Direct() if writing == "direct" else Copies(CopyMemory())
    model = Unusual(1.0)
    engine = DistributedState(model=model)
    if plan != "new":
        engine.save(tmp_path, lambda path, state: None)
        model.get_buffer("scalar_").fill_(2.0)
        monkeypatch.setattr("dlac_pipeline.extensions.sharded.distributed_state.save", None)
    engine.save(tmp_path, writer.write)
    writer.handed_over()
    expected = state_bytes(model)
    with torch.no_grad():
        model.weight.zero_()  # the checkpoint does not have this
    writer.finish()
    again = Unusual(0.0)
    DistributedState(model=again).load(tmp_path, saved_world_size=1)
    assert state_bytes(again) == expected
    others = {f"model.{str(dtype).removeprefix('torch.')}_" for dtype in OTHER_TYPES}
    others |= {"model.tied", "model.first_", "model.last_"}
    assert load_file(tmp_path / TENSORS).keys() == {f"model.{name}" for name in expected} - others
    assert {name: tensor.shape for name, tensor in weights_of("dcp", tmp_path).items()} == {
        name: shape for name, ((_, shape), _) in expected.items()
    }


class Hoarder(torch.optim.SGD):
    """An optimizer with nested state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss
        """Keep tensors in lists and dicts."""
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].get("history", [])
            self.state[parameter] = {
                "history": [*kept, parameter.grad.clone()][-2:],
                "by_number": {"3": parameter.grad + 1},
                "plain": (1, None, [2.5]),
                "steps": len(kept) + 1,
            }


def test_nested_optimizer_state_is_restored(tmp_path: Path) -> None:
    """Lists and dicts of tensors, and plain values next to them."""
    model, again = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = [Hoarder(each.parameters(), lr=0.1) for each in (model, again)]
    for step in (1, 1, 2):
        for each, optimizer in zip((model, again), optimizers, strict=True):
            each(torch.full((2, 3), float(step))).sum().backward()
            optimizer.step()
    optimizers[0].step()
    DistributedState(model=model, optimizer=optimizers[0]).save(tmp_path, Direct().write)
    DistributedState(model=again, optimizer=optimizers[1]).load(tmp_path, saved_world_size=1)
    assert str(optimizers[1].state_dict()) == str(optimizers[0].state_dict())
    assert "optimizer.state.weight.history.1" in load_file(tmp_path / TENSORS)
    with pytest.raises(CheckpointError, match=r"plain values, such as 'optimizer\.state\.weight\."):
        state_of("dcp", tmp_path, scratch=tmp_path)


class Tied(nn.Module):
    """A layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = self.head = nn.Linear(3, 3)


def test_shared_memory_is_stored_once(tmp_path: Path) -> None:
    """A tied or expanded tensor, and one with two overlapping views, takes the bytes that it has in memory."""
    model = Tied()
    model.tied = nn.Parameter(torch.ones(100, 1000))
    model.again = model.tied
    whole = torch.ones(50_000)
    for name, view in {"expanded": whole[:1].expand(1000, 1000), "first": whole[:40_000], "last": whole[9000:]}.items():
        model.register_buffer(name, view)
    DistributedState(model=model).save(tmp_path, Direct().write)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 610_000
