"""A state's file is what torch.save makes, digested on the way; a failure to write is the operating system's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blake3 import blake3

from dlac_pipeline.checkpoint.stage.streamed_file import write_state

_LARGE = 5 << 20
"""Numbers of four bytes: more than two of the buffers, and a part."""


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("numbers", [0, 1, 1000, _LARGE, _LARGE + 1])
def test_what_is_written_is_what_was_digested(tmp_path: Path, direct: bool, numbers: int) -> None:
    """Size and digest are the file's, past the page cache and through it, and the state comes back."""
    weight = torch.randn(numbers)
    state = {"weight": weight, "lr": 0.1}
    written = write_state(state, tmp_path / "state.pt", direct=direct)
    content = (tmp_path / "state.pt").read_bytes()
    assert (written.bytes, written.digest) == (len(content), blake3(content).hexdigest())
    found = torch.load(tmp_path / "state.pt")
    assert torch.equal(found["weight"], weight)
    assert found["lr"] == 0.1


def test_many_tensors_cross_the_ends_of_the_buffer(tmp_path: Path) -> None:
    """Tensors of odd sizes come back bit for bit, also mapped into memory."""
    state = [torch.randint(0, 255, (3_000_017 * (1 + n % 3),), dtype=torch.uint8) for n in range(7)]
    write_state(state, tmp_path / "state.pt")
    for mapped in (False, True):
        found = torch.load(tmp_path / "state.pt", mmap=mapped)
        assert all(torch.equal(one, other) for one, other in zip(found, state, strict=True))


def test_the_same_state_has_the_same_digest(tmp_path: Path) -> None:
    """Nothing of time or place is in a file."""
    state = {"weight": torch.arange(100.0)}
    (tmp_path / "other").mkdir()
    first, second = (write_state(state, folder / "state.pt") for folder in (tmp_path, tmp_path / "other"))
    assert first.digest == second.digest


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """A file that is there is an error, and stays as it is."""
    (tmp_path / "state.pt").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_state({}, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == b"mine"
