"""Machines that train a run together come, go and die: the run goes on with those that are there, and nothing else changes.

Here all of them are on one host, at one catalog; tests/faults/test_hosts.py gives each a network of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from dlac_pipeline.lakehouse.errors import NodesMissing, RunFinished, SpecInvalid
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from tests.conftest import PROGRAMS, wait_until
from tests.crews import check_exact, job, leader_of, trained_together, wait_for_checkpoint, wait_for_spare

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec
    from tests.conftest import Arena

STEPS = 63
"""Of one pass."""


@pytest.fixture
def together(campaign: Arena, request: pytest.FixtureRequest) -> JobSpec:
    """A job for two machines, or for as many as are there, with a rank each; plain losses, so that they can be compared."""
    return job(campaign, re.sub(r"[^\w]+", "-", request.node.name).strip("-"))


@pytest.mark.soak
def test_one_is_lost_and_another_one_comes(campaign: Arena, together: JobSpec) -> None:
    """SIGKILL of a machine's supervisor and ranks: the other goes on by itself, and makes room for one that comes later."""
    leader, other = trained_together(campaign, together)
    attempts = len(leader.of("attempt"))
    other.destroy()
    leader.wait_for("attempt", attempts + 1)
    leader.wait_for("recovered")
    (rank,) = leader.of("attempt")[-1]["pids"]
    os.kill(rank, signal.SIGSTOP)  # or it may be done before the new one has started
    new = campaign.launch(together)
    wait_for_spare(together, Ledger(campaign.lakehouse).table_uuid)
    os.kill(rank, signal.SIGCONT)
    assert [leader.wait(), new.wait()] == [0, 0], (leader.stderr, new.stderr)
    assert leader.of("rescale")[0]["cause"] == "more nodes have come"
    assert [launch.of("ended")[0]["ending"] for launch in (leader, new)] == ["finished", "finished"]
    check_exact(campaign, together.run, [2, 1, 2])
    assert leader.of("recovered")[0]["cause"].startswith(leader.of("failure")[0]["cause"])


def test_the_leader_is_lost(campaign: Arena, together: JobSpec) -> None:
    """Whoever is left leads, though it never claimed before; the fence is its own from then on."""
    leader, other = trained_together(campaign, together)
    leader.destroy()
    assert other.wait() == 0, other.stderr
    attempts = other.of("attempt")
    assert ["leader" in attempt for attempt in attempts[-2:]] == [True, False]
    check_exact(campaign, together.run, [2, 1])


@pytest.mark.soak
def test_leader_dies_before_announcing_claim(campaign: Arena, together: JobSpec) -> None:
    """The other one has heard of no attempt, finds a claim of its own rendezvous in the ledger, and replaces it."""
    marker = campaign.home / "killed-as-it-told"
    under = [sys.executable, str(PROGRAMS / "killed_when_it_tells.py"), str(marker)]
    launches = [campaign.launch(together, under=under) for _ in range(2)]
    wait_until(lambda: any(launch.process.poll() is not None for launch in launches), what="the death of the leader")
    dead, other = sorted(launches, key=lambda launch: launch.process.poll() is None)
    assert dead.process.poll() == -signal.SIGKILL
    assert not dead.of("attempt")
    assert other.wait() == 0, other.stderr
    assert len(campaign.rows(together.run, "claim")) == 2
    check_exact(campaign, together.run, [1])


@pytest.mark.soak
@pytest.mark.parametrize("back", ["continued", "started again"])
def test_the_rendezvous_is_away_for_a_while(campaign: Arena, together: JobSpec, back: str) -> None:
    """SIGSTOP, or SIGKILL, of its server: nobody hears anybody, nobody trains alone, and they go on once it is back."""
    address = together.launch.rendezvous
    spec = together.model_copy(update={"launch": together.launch.model_copy(update={"nodes": "2"})})
    server = _rendezvous(address)
    try:
        assert server.stdout is not None
        assert (
            "serving" in server.stdout.readline()
        )  # a node that finds no rendezvous at its own address serves one itself
        launches = trained_together(campaign, spec)
        server.send_signal(signal.SIGSTOP if back == "continued" else signal.SIGKILL)
        for launch in launches:
            launch.wait_for("failure")
        if back == "continued":
            server.send_signal(signal.SIGCONT)
        else:
            server.communicate()
            server = _rendezvous(address)  # which ends at once if a node already serves there
        assert [launch.wait() for launch in launches] == [0, 0], [launch.stderr for launch in launches]
    finally:
        server.kill()
        server.communicate()
    check_exact(campaign, spec.run, [2])


def _rendezvous(address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dlac_pipeline.cli.main", "rendezvous", address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.soak
def test_leaving_node_passes_run_on(campaign: Arena, together: JobSpec) -> None:
    """SIGTERM to `dlac train` on one machine: a checkpoint, not a row twice, and no failure; whichever of them led."""
    stays = campaign.launch(together)
    path = campaign.home / "leaves.yaml"
    path.write_text(yaml.safe_dump(together.model_dump(mode="json")))
    command = [sys.executable, "-m", "dlac_pipeline.cli.main", "train", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as leaves:
        wait_for_checkpoint(campaign, together.run, 2)
        leaves.terminate()
        said, _ = leaves.communicate(timeout=60)
    assert leaves.returncode == 0, said
    assert "stopped at step" in " ".join(said.split())
    assert stays.wait() == 0, stays.stderr
    check_exact(campaign, together.run, [2, 1])
    assert not stays.of("failure")
    assert [told["rows_replayed"] for told in stays.of("recovered")] == [0] * len(stays.of("recovered"))


@pytest.mark.soak
def test_a_stop_stops_them_all(campaign: Arena, together: JobSpec) -> None:
    """A person's Ctrl-C at one of them: both leave behind one checkpoint of the last step, and both can go on later."""
    leader, other = trained_together(campaign, together)
    os.kill(other.process.pid, signal.SIGTERM)
    for launch in (leader, other):
        assert launch.wait() == 0, launch.stderr
        assert launch.of("ended")[0]["ending"] == "stopped"
    stopped_at = campaign.lineage(together.run)[-1]["step"]
    again = [campaign.launch(together) for _ in range(2)]
    assert [launch.wait() for launch in again] == [0, 0], [launch.stderr for launch in again]
    assert leader_of(again).of("attempt")[0]["step"] == stopped_at < STEPS
    check_exact(campaign, together.run, [2])


@pytest.mark.soak
def test_a_stop_stops_one_that_waits(campaign: Arena) -> None:
    """Nor does one that was not needed go on with a run that a person has stopped."""
    spec = job(campaign, "stop-with-spare", nodes="2", passes=20)
    leader, other = trained_together(campaign, spec)
    spare = campaign.launch(spec)
    wait_for_spare(spec, Ledger(campaign.lakehouse).table_uuid)
    os.kill(leader.process.pid, signal.SIGTERM)
    for launch in (leader, other, spare):
        assert launch.wait() == 0, launch.stderr
        assert launch.of("ended")[0]["ending"] == "stopped"
    assert not spare.of("attempt")
    assert len(campaign.rows(spec.run, "claim")) == 1


@pytest.mark.soak
@pytest.mark.parametrize("who", ["the leader", "the other"])
def test_notice_to_rank_makes_node_leave(campaign: Arena, together: JobSpec, who: str) -> None:
    """As where one of several spot instances is taken away: a checkpoint of all, and the other machine goes on."""
    leader, other = trained_together(campaign, together)
    leaves, stays = (leader, other) if who == "the leader" else (other, leader)
    os.kill(leaves.of("attempt")[-1]["pids"][0], signal.SIGUSR1)
    assert leaves.wait() == 0, leaves.stderr
    assert stays.wait() == 0, stays.stderr
    assert (leaves.of("ended")[0]["ending"], stays.of("ended")[0]["ending"]) == ("stopped", "finished")
    check_exact(campaign, together.run, [2, 1])
    assert not stays.of("failure")


@pytest.mark.soak
def test_another_job_is_refused(campaign: Arena) -> None:
    """Two machines whose specs differ do not train together: both say so, and nothing is claimed."""
    spec = job(campaign, "unlike", nodes="2")
    unlike = spec.model_copy(update={"params": {**spec.params, "noise": "1"}})
    launches = [campaign.launch(each) for each in (spec, unlike)]
    assert [launch.wait() for launch in launches] == [SpecInvalid.exit_code] * 2
    assert "found another one on" in launches[0].of("error")[0]["message"]
    assert campaign.rows("unlike") == []


@pytest.mark.soak
def test_spare_node_replaces_lost_node(campaign: Arena) -> None:
    """Of three where two are wanted, one waits, and is told when it is needed, or that the run has ended."""
    spec = job(campaign, "one-too-many", nodes="2")
    leader, other = trained_together(campaign, spec)
    spare = campaign.launch(spec)
    other.destroy()
    assert leader.wait() == 0, leader.stderr
    assert spare.wait() == 0, spare.stderr
    assert spare.of("attempt")
    check_exact(campaign, spec.run, [2])


@pytest.mark.soak
def test_one_that_comes_too_late_is_told(campaign: Arena) -> None:
    """One that waits beside a full crew ends with the run, in seconds, not with the rendezvous' patience."""
    spec = job(campaign, "too-late", nodes="2")
    leader, other = trained_together(campaign, spec)
    spare = campaign.launch(spec)
    assert (leader.wait(), other.wait()) == (0, 0)
    assert spare.wait() in (0, RunFinished.exit_code), spare.stderr  # the latter if it came when all had gone
    assert not spare.of("attempt")


def test_too_few_are_told_so(campaign: Arena) -> None:
    """Nobody else comes: a clear error with its own exit status, nothing is claimed."""
    spec = job(campaign, "too-few", nodes="2", gather_timeout_s=2)
    launch = campaign.launch(spec)
    assert launch.wait() == NodesMissing.exit_code, launch.stderr
    assert "expected 2 nodes" in launch.of("error")[0]["message"]
    assert campaign.rows("too-few") == []


@pytest.mark.soak
def test_early_node_waits_for_first_checkpoint(campaign: Arena) -> None:
    """Room for it is made behind a checkpoint, however much longer than the grace period that takes."""
    env = {"COMMIT_SLEEPS_S": "3"}
    spec = job(campaign, "comes-early", program="train_slow_commit.py", every_steps=1000, grace_s=1, env=env)
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


@pytest.mark.soak
@pytest.mark.parametrize("who", ["the leader", "the other"])
def test_leaving_without_time_is_recorded(campaign: Arena, who: str) -> None:
    """No checkpoint would be committed by the deadline: the others do again what all had done since the last one."""
    run = f"no-time-{who.replace(' ', '-')}"
    leader, other = trained_together(campaign, job(campaign, run, program="train_no_time.py"))
    leaves, stays = (leader, other) if who == "the leader" else (other, leader)
    os.kill(leaves.of("attempt")[-1]["pids"][0], signal.SIGUSR1)
    assert [launch.wait() for launch in (leaves, stays)] == [0, 0], (leaves.stderr, stays.stderr)
    (told,) = leader.of("preempted")
    (left,) = [each for each in recoveries_of(campaign.lakehouse, run) if each.cause.startswith("leaving: node ")]
    assert left.rows_replayed == told["lost_rows"] > 0
    assert left.work_lost_s
    check_exact(campaign, run, [2, 1])
