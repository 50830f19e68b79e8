"""The wait between two retries."""

from __future__ import annotations

import subprocess
import sys

PAUSES = """
import os
from tenacity import RetryCallState
from dlac_pipeline.lakehouse.retrying import retrying
for _ in range(4):
    if os.fork() == 0:
        policy = retrying()
        print(policy.wait(RetryCallState(policy, None, (), {})), flush=True)
        os._exit(0)
    os.wait()
"""


def test_forked_ranks_wait_differently() -> None:
    """Ranks that lost the same race would otherwise meet again at every retry."""
    pauses = subprocess.run([sys.executable, "-c", PAUSES], check=True, capture_output=True, text=True).stdout.split()
    assert len(set(pauses)) == 4
