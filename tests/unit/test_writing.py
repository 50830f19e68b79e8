"""Copied states: the copy keeps values, shared memory, and objects that are no tensors."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct, Writer


def saved(writer: Writer, folder: Path, state: Any) -> Any:
    """Write a state, and return the content of its file."""
    writer.write(folder / "state.pt", state)
    writer.finish()
    return torch.load(folder / "state.pt", weights_only=False)


def copying() -> Copies:
    """Return a writer of copies."""
    return Copies(CopyMemory())


def test_change_after_copy_is_absent(tmp_path: Path) -> None:
    """The file has the values at the time of the copy, although tensors, items and lists change later."""
    state: dict[str, Any] = {
        "weight": torch.arange(6.0).reshape(2, 3),
        "steps": [1, 2],
        "nested": {"lr": 0.1, "rows": torch.ones(3)},
    }
    copies = Copies(CopyMemory())
    copies.write(tmp_path / "state.pt", state)
    state["weight"].add_(100)
    state["steps"].append(3)
    state["nested"]["rows"].zero_()
    state["nested"]["lr"] = 9.9
    copies.finish()
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3))
    assert found["steps"] == [1, 2]
    assert found["nested"]["lr"] == 0.1
    assert torch.equal(found["nested"]["rows"], torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_copied_model_equals_direct_write(tmp_path: Path, dtype: torch.dtype) -> None:
    """The file content is the same for any result of state_dict()."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    extra = torch.ones(5, dtype=dtype)
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "extra": extra,
        "none": None,
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = saved(Direct(), tmp_path / "a", state), saved(copying(), tmp_path / "b", state)
    assert str(first) == str(second)
    assert first["extra"].dtype == second["extra"].dtype == dtype
    assert isinstance(second["model"], OrderedDict)
    assert vars(second["model"]) == vars(state["model"])  # its _metadata


def test_views_stay_shared(tmp_path: Path) -> None:
    """Two views of a flat buffer, and a tensor with two names, are copied once and stay shared."""
    flat = torch.arange(10.0)
    state = {"head": flat[:4], "tail": flat[6:].view(2, 2), "transposed": flat.view(2, 5).t(), "again": flat}
    copies = Copies(CopyMemory())
    copies.write(tmp_path / "state.pt", state)
    assert copies.bytes == 40
    copies.finish()
    found = torch.load(tmp_path / "state.pt")
    assert torch.equal(found["transposed"], flat.view(2, 5).t())
    assert torch.equal(found["tail"], torch.tensor([[6.0, 7.0], [8.0, 9.0]]))
    assert len({found[name].untyped_storage().data_ptr() for name in state}) == 1


def test_copy_memory_is_used_again(tmp_path: Path) -> None:
    """The second checkpoint of the same state takes no new memory, and has new values."""
    memory, weight = CopyMemory(), torch.zeros(1000)
    addresses = []
    for step in range(3):
        weight.fill_(step)
        copies = Copies(memory)
        copies.write(tmp_path / f"{step}.pt", {"weight": weight})
        (copied,) = copies.storages
        addresses.append(copied.data_ptr())
        copies.finish()
    assert len(set(addresses)) == 1
    assert [torch.load(tmp_path / f"{step}.pt")["weight"][0].item() for step in range(3)] == [0, 1, 2]


def test_parameters_and_objects_keep_type(tmp_path: Path) -> None:
    """A Parameter stays one. Numbers, strings, empty tensors and tuples are loaded as saved."""
    state = {"p": torch.nn.Parameter(torch.ones(2)), "t": (1, "two", torch.zeros(0)), "big": 2**70}
    found = saved(copying(), tmp_path, state)
    assert isinstance(found["p"], torch.nn.Parameter)
    assert found["p"].requires_grad
    assert found["t"][:2] == (1, "two")
    assert found["t"][2].shape == (0,)
    assert found["big"] == 2**70


def test_differently_sized_storage_is_copied_whole(tmp_path: Path) -> None:
    """Two tensors at one address, the shorter one first, are both complete."""
    numbers = np.arange(100.0)
    state = {"short": torch.from_numpy(numbers[:10]), "long": torch.from_numpy(numbers)}
    found = saved(copying(), tmp_path, state)
    assert torch.equal(found["short"], torch.arange(10.0, dtype=torch.float64))
    assert torch.equal(found["long"], torch.arange(100.0, dtype=torch.float64))


def test_conjugated_views_keep_values(tmp_path: Path) -> None:
    """conj() only sets a bit. The saved values are the conjugated ones."""
    waves = torch.tensor([1 + 2j, 3 - 4j])
    found = saved(copying(), tmp_path, {"conj": waves.conj(), "imag": waves.conj().imag})
    assert torch.equal(found["conj"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(found["imag"], torch.tensor([-2.0, 4.0]))


class Pair(NamedTuple):
    """A tuple as some optimizers keep it."""

    first: torch.Tensor
    second: int


class TrackedCopyMemory(CopyMemory):
    """Copy memory that knows which of its storages still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[weakref.ref[torch.UntypedStorage]] = []

    def copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Copy the storage, and remember the copy."""
        copied = super().copy_of(storage)
        self._copies.append(weakref.ref(copied))
        return copied

    @property
    def sizes(self) -> list[int]:
        """The bytes of each existing storage."""
        return [storage.nbytes() for one in self._copies if (storage := one()) is not None]


def test_unneeded_memory_is_released(tmp_path: Path) -> None:
    """A named tuple is copied by its fields. Memory that the next checkpoint does not need is released."""
    memory = TrackedCopyMemory()
    for size in (1000, 2000, 3000):
        copies = Copies(memory)
        pair = Pair(torch.full((size,), 7.0), 3)
        copies.write(tmp_path / f"{size}.pt", pair)
        copies.handed_over()
        pair.first.zero_()
        copies.finish()
        found = torch.load(tmp_path / f"{size}.pt", weights_only=False)
        assert (found.first.mean().item(), found.second) == (7.0, 3)
        assert memory.sizes == [4 * size]
