"""Ranks meet in a process group under any launcher, and again after torchrun restarts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, time
import torch, torch.distributed as dist
from dlac_pipeline.elastic.ranks.process_group import join

restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if restarted and os.environ["RANK"] == "0":
    time.sleep(3)  # rank 1 looks for rank 0 now
join()
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
if not restarted and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_restarted_ranks_meet_again(tmp_path: Path) -> None:
    """The restarted ranks find no address of the dead ones."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    done = subprocess.run([*torchrun, str(program)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
