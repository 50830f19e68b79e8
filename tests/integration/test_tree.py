"""Messages of the ranks' tree between real processes."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import PROGRAMS


def test_threads_share_a_group() -> None:
    """Two trees with tags and sums over one group do not mix, and the lowest rank's failure reaches all."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / "talk_in_threads.py"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr
