"""The wait between two retries."""

import subprocess
import sys

from tests.forked import Forked

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
    with Forked([sys.executable, "-c", PAUSES], stdout=subprocess.PIPE, text=True) as process:
        pauses = process.communicate()[0].split()
    assert len(set(pauses)) == 4
