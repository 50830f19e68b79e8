"""Nodes, which are processes of this node, join, exit and die. The run resumes on the others, with the same batches."""

import os
import re
import signal
import subprocess
import sys

import pytest
import yaml

from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import PROGRAMS, Arena, wait_until
from tests.launched_nodes import check_exact, job, leader_of, train_together, wait_for_checkpoint, wait_for_spare

STEPS = 63
"""Rows of one pass."""


@pytest.fixture
def two_node_job(campaign: Arena, request: pytest.FixtureRequest) -> JobSpec:
    """A job for up to two nodes with one rank each. Losses have no noise, so that they can be compared."""
    return job(campaign, re.sub(r"[^\w]+", "-", request.node.name).strip("-"))


@pytest.mark.slow
def test_survivor_leads_after_lost_leader(campaign: Arena, two_node_job: JobSpec) -> None:
    """The remaining node leads, although it never claimed before. It owns the fence from then on."""
    leader, other = train_together(campaign, two_node_job)
    leader.destroy()
    assert other.wait() == 0, other.stderr
    assert ["leader" in attempt for attempt in other.of("attempt")[-2:]] == [True, False]
    check_exact(campaign, two_node_job.run, [2, 1])


@pytest.mark.soak
def test_leader_dies_before_announcing_claim(campaign: Arena, two_node_job: JobSpec) -> None:
    """The second node knows no attempt. It finds a claim of its rendezvous in the ledger, and replaces it."""
    under = [sys.executable, str(PROGRAMS / "kill_at_announcement.py"), str(campaign.home / "killed-at-announcement")]
    launches = [campaign.launch(two_node_job, under=under) for _ in range(2)]
    wait_until(lambda: any(launch.process.poll() is not None for launch in launches), what="the death of the leader")
    dead, other = sorted(launches, key=lambda launch: launch.process.poll() is None)
    assert dead.process.poll() == -signal.SIGKILL
    assert not dead.of("attempt")
    assert other.wait() == 0, other.stderr
    assert len(campaign.rows(two_node_job.run, ClaimRow)) == 2
    check_exact(campaign, two_node_job.run, [1])


@pytest.mark.soak
@pytest.mark.parametrize("back", ["continued", "started again"])
def test_nodes_resume_after_rendezvous_outage(campaign: Arena, two_node_job: JobSpec, back: str) -> None:
    """SIGSTOP or SIGKILL of its server: no node receives a message or trains alone. They resume when it is back."""
    address = two_node_job.launch.rendezvous
    spec = two_node_job.model_copy(update={"launch": two_node_job.launch.model_copy(update={"nodes": "2"})})
    server = _rendezvous(address)
    try:
        assert server.stdout is not None
        assert (
            "serving" in server.stdout.readline()
        )  # a node that finds no rendezvous at its own address serves one itself
        launches = train_together(campaign, spec)
        server.send_signal(signal.SIGSTOP if back == "continued" else signal.SIGKILL)
        for launch in launches:
            launch.wait_for("failure")
        if back == "continued":
            server.send_signal(signal.SIGCONT)
        else:
            server.communicate()
            server = _rendezvous(address)  # ends at once if a node already serves there
        assert [launch.wait() for launch in launches] == [0, 0], [launch.stderr for launch in launches]
    finally:
        server.kill()
        server.communicate()
    check_exact(campaign, spec.run, [2])


def _rendezvous(address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dlac_pipeline.cli.main", "rendezvous", address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.soak
def test_leaving_node_passes_run_on(campaign: Arena, two_node_job: JobSpec) -> None:
    """SIGTERM to `dlac train` on either node causes a checkpoint, repeats no row, and is no failure."""
    stays = campaign.launch(two_node_job)
    path = campaign.home / "leaves.yaml"
    path.write_text(yaml.safe_dump(two_node_job.model_dump(mode="json")))
    command = [sys.executable, "-m", "dlac_pipeline.cli.main", "train", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as leaves:
        wait_for_checkpoint(campaign, two_node_job.run, 2)
        leaves.terminate()
        output, _ = leaves.communicate(timeout=60)
    assert leaves.returncode == 0, output
    assert "stopped at step" in " ".join(output.split())
    assert stays.wait() == 0, stays.stderr
    check_exact(campaign, two_node_job.run, [2, 1])
    assert not stays.of("failure")
    assert [event["rows_replayed"] for event in stays.of("recovered")] == [0] * len(stays.of("recovered"))


@pytest.mark.soak
def test_stop_ends_all_nodes(campaign: Arena, two_node_job: JobSpec) -> None:
    """Ctrl-C at one node: both exit after one checkpoint of the last step, and both can resume later."""
    leader, other = train_together(campaign, two_node_job)
    os.kill(other.process.pid, signal.SIGTERM)
    for launch in (leader, other):
        assert launch.wait() == 0, launch.stderr
        assert launch.of("ended")[0]["ending"] == "stopped"
    stopped_at = campaign.lineage(two_node_job.run)[-1].step
    again = [campaign.launch(two_node_job) for _ in range(2)]
    assert [launch.wait() for launch in again] == [0, 0], [launch.stderr for launch in again]
    assert leader_of(again).of("attempt")[0]["step"] == stopped_at < STEPS
    check_exact(campaign, two_node_job.run, [2])


@pytest.mark.soak
@pytest.mark.parametrize("has_time", [True, False])
@pytest.mark.parametrize("who", ["the leader", "the other"])
def test_preempted_rank_ends_its_node(campaign: Arena, two_node_job: JobSpec, who: str, has_time: bool) -> None:
    """One of several spot instances is preempted: all ranks save a checkpoint if there is time, and the other node resumes."""
    run, env = two_node_job.run, {} if has_time else {"EXPECTED_S": "3600"}
    leader, other = train_together(campaign, job(campaign, run, program="train_sabotaged.py", env=env))
    leaves, stays = (leader, other) if who == "the leader" else (other, leader)
    os.kill(leaves.of("attempt")[-1]["pids"][0], signal.SIGUSR1)
    assert [launch.wait() for launch in (leaves, stays)] == [0, 0], (leaves.stderr, stays.stderr)
    assert (leaves.of("ended")[0]["ending"], stays.of("ended")[0]["ending"]) == ("stopped", "finished")
    check_exact(campaign, run, [2, 1])
    if has_time:
        assert not stays.of("failure")
    else:
        (event,) = leader.of("preempted")
        (left,) = [each for each in recoveries_of(campaign.lakehouse, run) if each.cause.startswith("leaving: node ")]
        assert left.rows_replayed == event["lost_rows"] > 0
        assert left.work_lost_s


@pytest.mark.soak
def test_early_node_waits_for_first_checkpoint(campaign: Arena) -> None:
    """A rescale for it follows a checkpoint, however much longer than the grace period the checkpoint takes."""
    env = {"COMMIT_SLEEPS_S": "3"}
    spec = job(campaign, "comes-early", program="train_sabotaged.py", every_steps=1000, deadline_s=1, env=env)
    first = campaign.launch(spec)
    first.wait_for("training")
    (rank,) = first.of("attempt")[0]["pids"]
    os.kill(rank, signal.SIGSTOP)
    comes = campaign.launch(spec)
    wait_for_spare(spec, Ledger(campaign.lakehouse).table_uuid)
    os.kill(rank, signal.SIGCONT)
    assert [launch.wait() for launch in (first, comes)] == [0, 0], (first.stderr, comes.stderr)
    assert first.of("checkpoint")[0]["reason"] == "nodes"
    assert not first.of("failure") + first.of("preempted"), first.of("failure")
    (met,) = first.of("recovered")
    assert (met["cause"], met["rows_replayed"], met["work_lost_s"]) == ("more nodes have come", 0, 0.0)
    check_exact(campaign, spec.run, [1, 2])
