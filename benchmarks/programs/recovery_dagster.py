"""A Dagster job without DLAC, for benchmarks/recovery_daemon.py: torchrun starts the script, and the op starts it again."""

import os
import subprocess
import sys

import dagster as dg


class BareTraining(dg.Config):
    """The command to start."""

    ranks: int
    script: str
    arguments: list[str]


@dg.op
def train(config: BareTraining) -> None:
    """Ask for a retry if torchrun fails. A `RetryPolicy` would also retry an op that is cancelled."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    try:
        subprocess.run([*command, config.script, *config.arguments], env=environment, check=True)
    except subprocess.CalledProcessError as err:
        raise dg.RetryRequested(max_retries=1_000) from err


@dg.job
def bare_job() -> None:
    """One op."""
    train()


defs = dg.Definitions(jobs=[bare_job], executor=dg.in_process_executor)
