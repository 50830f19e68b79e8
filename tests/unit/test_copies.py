"""Copies of storages of any size."""

from pathlib import Path

import pytest
import torch

from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory


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
