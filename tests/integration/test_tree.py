"""Messages of the ranks' tree between real processes."""

import subprocess
import sys

from tests.conftest import PROGRAMS
from tests.forked import Forked


def test_threads_share_a_group() -> None:
    """Two trees with tags and sums over one group do not mix, and the lowest rank's failure reaches all."""
    command = [sys.executable, str(PROGRAMS / "talk_in_threads.py")]
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said, problems = process.communicate(timeout=300)
    assert (process.returncode, said) == (0, "exact\n"), problems
