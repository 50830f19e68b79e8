"""The file of a state that cannot grow: the failure is the operating system's own error."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Forked

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


@pytest.mark.parametrize("room", [10 << 20, *(pytest.param(room, marks=pytest.mark.soak) for room in (0, 40 << 20))])
def test_file_that_cannot_grow_raises_oserror(tmp_path: Path, room: int) -> None:
    """The error is the same at the first byte, inside a tensor and in the last part, and never torch's RuntimeError."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    program = [sys.executable, "-c", _FILLS_UP, str(tmp_path / "state.pt"), str(room)]
    with Forked(program, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=120)
    assert output.split() == ["OSError", str(errno.EFBIG)]
