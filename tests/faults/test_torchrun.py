"""An unmodified torchrun on several nodes, with DLAC's rounds as its rendezvous. Nodes are lost and join, and no row is lost."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import PROGRAMS, Arena, wait_until
from tests.launched_nodes import check_exact, job, wait_for_checkpoint
from tests.ports import own_port

TORCHRUN = Path(sys.executable).with_name("torchrun")
StartAgent = Callable[["JobSpec"], subprocess.Popen[bytes]]


@pytest.fixture
def start_agent(campaign: Arena) -> Iterator[StartAgent]:
    """Yield a function that starts torchrun as one node of a job, with a rank."""
    agents: list[subprocess.Popen[bytes]] = []

    def start(spec: JobSpec) -> subprocess.Popen[bytes]:
        file = campaign.home / f"{spec.run}.yaml"
        alone = spec.launch.model_copy(update={"nodes": "", "rendezvous": ""})
        file.write_text(yaml.safe_dump(spec.model_copy(update={"launch": alone}).model_dump(mode="json")))
        environment = {**os.environ, "JOB_SPEC": str(file), "DLAC_HOME": str(campaign.home), "OMP_NUM_THREADS": "1"}
        command = [
            *(str(TORCHRUN), "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2"),
            *("--rdzv-backend=dlac", f"--rdzv-endpoint={spec.launch.rendezvous}", f"--rdzv-id={spec.run}"),
            *("--rdzv-conf=last_call_timeout=1,node_timeout=3,timeout=60", str(PROGRAMS / "train_tiny.py")),
        ]
        with (campaign.home / f"{spec.run}-agent-{len(agents)}.log").open("wb") as log:
            agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        return agents[-1]

    yield start
    for agent in agents:
        kill(agent)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill a node: its agent and its rank."""
    with suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)):
            process.kill()
    agent.wait()


def torchrun_job(campaign: Arena, run: str) -> JobSpec:
    """Return a job whose nodes meet at a port of this one."""
    return job(campaign, run, rendezvous=f"127.0.0.1:{own_port()}")


def log_of(campaign: Arena, run: str) -> str:
    """Return the ends of the agents' logs."""
    return "\n".join(path.read_text()[-3000:] for path in sorted(campaign.home.glob(f"{run}-agent-*.log")))


@pytest.mark.slow
def test_torchrun_survives_lost_node(campaign: Arena, start_agent: StartAgent) -> None:
    """SIGKILL of the node that does not serve the rendezvous: the serving node resumes alone."""
    spec = torchrun_job(campaign, "torchrun-lost")
    stays = start_agent(spec)
    lost = start_agent(spec)
    wait_for_checkpoint(campaign, spec.run, 2)
    kill(lost)
    assert stays.wait(timeout=200) == 0, log_of(campaign, spec.run)
    check_exact(campaign, spec.run, [2, 1])


@pytest.mark.soak
def test_torchrun_admits_newcomer(campaign: Arena, start_agent: StartAgent) -> None:
    """A new node trains with the first one after an emergency checkpoint. No step is repeated."""
    spec = torchrun_job(campaign, "torchrun-grows")
    agents = [start_agent(spec)]
    wait_until(lambda: bool(campaign.rows(spec.run, CheckpointRow)), what="a checkpoint of one rank")
    agents.append(start_agent(spec))
    assert [agent.wait(timeout=200) for agent in agents] == [0, 0], log_of(campaign, spec.run)
    check_exact(campaign, spec.run, [1, 2])
