"""A state's file is what torch.save makes, digested on the way; a failure to write is the operating system's own."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
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


_FILLS_UP = """
import resource, sys
from pathlib import Path
import torch
from dlac_pipeline.checkpoint.stage.streamed_file import write_state
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    write_state([torch.ones(5 << 20), torch.ones(5 << 20)], Path(sys.argv[1]))
except OSError as err:
    print(type(err).__name__, err.errno)
"""


@pytest.mark.parametrize("room", [0, 10 << 20, 40 << 20])
def test_a_file_that_cannot_grow_is_an_oserror(tmp_path: Path, room: int) -> None:
    """At the first byte, in the middle of a tensor and in the last part: never torch's RuntimeError about a position."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    program = [sys.executable, "-c", _FILLS_UP, str(tmp_path / "state.pt"), str(room)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["OSError", str(errno.EFBIG)]
