import re
import shlex
import subprocess
from pathlib import Path

import pytest

from dlac_pipeline.extensions.clusters.packed_request import unpack
from dlac_pipeline.launchers.protocol import render_job
from tests.extensions.clusters.cluster import SLURM, cluster_request


def test_slurm_script_asks_for_range() -> None:
    """The script requests a range of nodes, gets a signal in time for a checkpoint, and no node's end ends another."""
    script = render_job(cluster_request("slurm", SLURM))
    assert set(re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)) == {
        *("--job-name=dlac-web-text-v2", "--requeue", "--nodes=2-4", "--no-kill", "--signal=TERM@100"),
        *("--cpus-per-task=8", "--gpus-per-node=4", "--mem=64000", "--time=26:03:04", "--partition=h100"),
        *("--account=lm", "--constraint=ib", "--open-mode=append", "--output=slurm-%j-nodes.err"),
    }
    (srun,) = re.findall(r"^srun (.*)$", script.replace("\\\n", ""), re.MULTILINE)
    words = shlex.split(srun)
    assert {"--ntasks-per-node=1", "--ntasks=$SLURM_JOB_NUM_NODES", "--cpus-per-task=8", "--no-kill"} <= set(words)
    assert {"--wait=0", "--kill-on-bad-exit=0", "--open-mode=append"} <= set(words)
    assert words[-3:] == ["python3", "-m", "dlac_pipeline.extensions.clusters.node_process"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_slurm_script_carries_request() -> None:
    """The request reaches the nodes unchanged, with variables of the ranks."""
    env = {"NCCL_DEBUG": "WARN", "A": "pa$$word, 'x' $(HOME) ${app_id}\n%"}
    script = render_job(cluster_request("slurm", SLURM, env=env))
    exports = script[script.index("export ") : script.index("export DLAC_FIRST_NODE")]
    output = subprocess.run(["bash"], input=f"{exports}\nenv -0", text=True, check=True, capture_output=True).stdout
    environment = dict(pair.split("=", 1) for pair in output.rstrip("\0").split("\0"))
    assert unpack(environment) == cluster_request("slurm", SLURM, env=env)


@pytest.mark.parametrize(
    ("code", "restarts", "facts", "again"),
    [
        (0, 0, "JobState=RUNNING PreemptTime=2026-11-23T08:38:48 ", False),
        (3, 9, "JobState=RUNNING PreemptTime=2026-11-23T08:38:48 ", True),
        (3, 0, "JobState=CANCELLED PreemptTime=2026-11-23T08:38:48 ", False),
        (3, 0, "JobState=RUNNING PreemptTime=None ", False),
        (85, 1, "JobState=RUNNING PreemptTime=None ", True),
        (85, 2, "JobState=RUNNING PreemptTime=None ", False),
    ],
    ids=["finished", "preempted", "cancelled", "at the time limit", "failed", "failed too often"],
)
def test_slurm_script_requeues_itself(tmp_path: Path, code: int, restarts: int, facts: str, again: bool) -> None:
    """A preempted job is requeued even if Slurm does not requeue it, and a failed one up to `retries` times."""
    script = render_job(cluster_request("slurm", SLURM))
    programs = f"""
        srun() {{ return {code}; }}
        sleep() {{ :; }}
        scontrol() {{ [ "$1" = requeue ] && touch again || echo "JobId=7 {facts}Reason=None"; }}
    """
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "PATH": "/usr/bin:/bin"}
    environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(
        ["bash"], input=programs + script, text=True, check=False, cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "again").exists() == again
