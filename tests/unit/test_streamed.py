"""The file of a state: the content of torch.save, digested during the write. A failed write raises the system's error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blake3 import blake3

from dlac_pipeline.checkpoint.stage.streamed_file import write_state

_LARGE = 5 << 20
"""Numbers of four bytes that fill the buffer twice and in part."""


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("numbers", [0, 1, 1000, _LARGE, _LARGE + 1])
def test_written_file_matches_digest(tmp_path: Path, direct: bool, numbers: int) -> None:
    """Size and digest are the file's, with direct I/O and through the page cache, and the state is loaded again."""
    weight = torch.randn(numbers)
    state = {"weight": weight, "lr": 0.1}
    written = write_state(state, tmp_path / "state.pt", direct=direct)
    content = (tmp_path / "state.pt").read_bytes()
    assert (written.bytes, written.digest) == (len(content), blake3(content).hexdigest())
    found = torch.load(tmp_path / "state.pt")
    assert torch.equal(found["weight"], weight)
    assert found["lr"] == 0.1


def test_tensors_cross_buffer_ends(tmp_path: Path) -> None:
    """Tensors of odd sizes are loaded bit for bit, from a memory map too."""
    state = [torch.randint(0, 255, (3_000_017 * (1 + n % 3),), dtype=torch.uint8) for n in range(7)]
    write_state(state, tmp_path / "state.pt")
    for mapped in (False, True):
        found = torch.load(tmp_path / "state.pt", mmap=mapped)
        assert all(torch.equal(one, other) for one, other in zip(found, state, strict=True))


def test_same_state_has_same_digest(tmp_path: Path) -> None:
    """A file contains no time and no path."""
    state = {"weight": torch.arange(100.0)}
    (tmp_path / "other").mkdir()
    first, second = (write_state(state, folder / "state.pt") for folder in (tmp_path, tmp_path / "other"))
    assert first.digest == second.digest


def test_name_does_not_choose_format(tmp_path: Path) -> None:
    """An engine of a user's own may give its files any name."""
    write_state({"step": 3}, tmp_path / "state.safetensors")
    with (tmp_path / "state.safetensors").open("rb") as stream:
        assert torch.load(stream) == {"step": 3}


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """An existing file is an error, and does not change."""
    (tmp_path / "state.pt").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_state({}, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == b"mine"
