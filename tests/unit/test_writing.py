"""The files of states: copies keep values and shared memory, and content is digested during the write."""

import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load

from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Writer
from dlac_pipeline.checkpoint.stage.streamed_file import TensorFile, write_state
from dlac_pipeline.checkpoint.stage.watch import storage_key
from dlac_pipeline.memory_states.memory_file import MemoryFile


def saved(writer: Writer, folder: Path, state: Any) -> Any:
    """Write a state, and return the content of its file."""
    writer.write(folder / "state.pt", state)
    writer.finish()
    return torch.load(folder / "state.pt", weights_only=False)


def test_views_stay_shared(tmp_path: Path) -> None:
    """Two views of a flat buffer, and a tensor with two names, are copied once and stay shared."""
    flat = torch.arange(10.0)
    state = {"head": flat[:4], "tail": flat[6:].view(2, 2), "transposed": flat.view(2, 5).t(), "again": flat}
    copies = Copies(CopyMemory(), stable={storage_key(flat): "flat"})
    copies.write(tmp_path / "state.pt", state)
    assert sum(each.nbytes() for each in copies.storages) == 40
    assert len(copies.watch._numbers[flat.data_ptr()]) == 1
    copies.finish()
    found = torch.load(tmp_path / "state.pt")
    assert torch.equal(found["transposed"], flat.view(2, 5).t())
    assert torch.equal(found["tail"], torch.tensor([[6.0, 7.0], [8.0, 9.0]]))
    assert len({found[name].untyped_storage().data_ptr() for name in state}) == 1


@pytest.mark.parametrize("offset", [0, 512])
def test_swapped_view_is_as_before(tmp_path: Path, offset: int) -> None:
    """A view that is changed while a safetensors file is written, and changed back, is in it as it was before."""
    flat = torch.randn(1 << 16)
    view = flat[offset:] if offset else flat.view(256, 256).t()
    before = view.clone()

    def read(address: int) -> None:
        copies.watch.compare(address)
        view.data.neg_()

    file, stable = MemoryFile(tmp_path / "x", is_mapped=False), {storage_key(flat): "flat"}
    copies = Copies(CopyMemory(), lambda state, _: file.overwrite(state, read), stable=stable, streams=True)
    copies.write(tmp_path / "x", TensorFile({"view": view}, {}))
    copies.finish()
    assert torch.equal(load((tmp_path / "x").read_bytes())["view"], before)


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


def test_differently_sized_storage_is_copied_whole(tmp_path: Path) -> None:
    """Two tensors at one address, the shorter one first, are both complete."""
    numbers = np.arange(100.0)
    state = {"short": torch.from_numpy(numbers[:10]), "long": torch.from_numpy(numbers)}
    found = saved(Copies(CopyMemory()), tmp_path, state)
    assert torch.equal(found["short"], torch.arange(10.0, dtype=torch.float64))
    assert torch.equal(found["long"], torch.arange(100.0, dtype=torch.float64))


class Pair(NamedTuple):
    """A tuple as some optimizers keep it."""

    first: torch.Tensor
    second: int


def test_unneeded_memory_is_released(tmp_path: Path) -> None:
    """A named tuple is copied by its fields. Memory that the next checkpoint does not need is released."""
    memory = CopyMemory()
    kept: list[weakref.ref[torch.UntypedStorage]] = []
    for size in (1000, 2000, 3000):
        copies = Copies(memory)
        pair = Pair(torch.full((size,), 7.0), 3)
        copies.write(tmp_path / f"{size}.pt", pair)
        kept += [weakref.ref(storage) for storage in copies.storages]
        copies.handed_over()
        pair.first.zero_()
        copies.finish()
        found = torch.load(tmp_path / f"{size}.pt", weights_only=False)
        assert (found.first.mean().item(), found.second) == (7.0, 3)
        assert [each() is None for each in kept] == [True] * (len(kept) - 1) + [False]


@pytest.mark.parametrize("count", [1, 7, 8, 16, 4096])
def test_copies_have_the_same_bytes(tmp_path: Path, count: int) -> None:
    """Also of memory that is not a number of words. The original may change then."""
    original = torch.frombuffer(bytearray(range(256)) * 17, dtype=torch.uint8, count=count)
    expected = original.clone()
    written: dict[str, torch.Tensor] = {}
    copies = Copies(CopyMemory(), save=lambda state, path: written.update({path.name: state["part"].clone()}))
    copies.write(tmp_path / "file", {"part": original})
    original.fill_(0)
    copies.finish()
    assert torch.equal(written["file"], expected)


def test_copy_counts_nothing_twice(tmp_path: Path) -> None:
    """The milestones of a `MultiStepLR` are a `Counter`, whose `update` adds: each would lower the learning rate twice."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]).state_dict()
    written: list[dict[str, object]] = []
    copies = Copies(CopyMemory(), save=lambda copied, path: written.append(copied))
    copies.write(tmp_path / "file", state)
    copies.finish()
    assert written == [state]


_LARGE = 5 << 20
"""Numbers of four bytes that fill the buffer twice and in part."""


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("numbers", [0, 1, 1000, _LARGE, _LARGE + 1])
def test_written_file_matches_digest(tmp_path: Path, direct: bool, numbers: int) -> None:
    """Size and digest are the file's, with direct I/O and through the page cache, and the state is loaded again."""
    weight = torch.randn(numbers)
    written = write_state({"weight": weight, "lr": 0.1}, tmp_path / "state.pt", direct=direct)
    content = (tmp_path / "state.pt").read_bytes()
    assert (written.bytes, written.digest) == (len(content), blake3(content).hexdigest())
    found = torch.load(tmp_path / "state.pt")
    assert torch.equal(found["weight"], weight)
    assert found["lr"] == 0.1


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """An existing file is an error, and does not change."""
    (tmp_path / "state.pt").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_state({}, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == b"mine"
