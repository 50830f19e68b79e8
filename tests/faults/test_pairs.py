"""The quick set of benchmarks/pairs.py: a few combinations of features under a fault."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_combinations_agree_with_their_logs() -> None:
    """Rows, digests, audit and what follows equal the training script's log."""
    pytest.importorskip("torchft")
    command = [sys.executable, "-m", "benchmarks.pairs", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
