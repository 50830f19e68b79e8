"""Runs as jobs of a real local Slurm: a controller and three nodes, which are lost, preempted and restarted."""

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlac_pipeline.extensions.clusters.cluster_job import ClusterJob
from dlac_pipeline.extensions.clusters.slurm import PREFERS_S, Slurm
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Outcome
from tests.conftest import Arena, wait_until
from tests.extensions.clusters.cluster import check_exact
from tests.extensions.clusters.slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

pytestmark = needs_slurm
SLOW: dict[str, Any] = {"slow_rank": 0, "slow_s": 0.1}
RANK = re.compile(r"dlac r1 rank 0/")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A Slurm with three idle nodes. Jobs are submitted from the test's folder."""
    monkeypatch.chdir(tmp_path)
    with slurm_cluster(tmp_path / "slurm", monkeypatch) as running:
        yield running


def request_for(arena: Arena, *, nodes: str, on_node: str = "", **changes: Any) -> Request:
    """Return a request for a job with a rank on each node. The user requires the node `on_node`, if it is given."""
    spec = arena.spec("r1", on="slurm", nodes=nodes, nproc_per_node=1, passes=1, **changes)
    options = {"nodelist": on_node} if on_node else {}
    cluster = {"python": sys.executable, "cpu": 2, "options": options}
    return Request(spec=parse_spec(spec.model_dump() | {"cluster": cluster}, origin="the test"), repin=True)


class FollowedJob:
    """`dlac train` on a thread: a job, its events, and its outcome."""

    def __init__(self, arena: Arena, *, nodes: str, prefers_s: float = PREFERS_S, **changes: Any) -> None:
        request = request_for(arena, nodes=nodes, **changes)
        self.events: list[dict[str, Any]] = []
        self.job = ClusterJob(request, Slurm(prefers_s=prefers_s), self.events.append, look_s=0.5, gone_s=5.0)
        self._ended: list[Outcome | Exception] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._ended.append(self.job.run())
        except Exception as err:
            self._ended.append(err)

    @property
    def number(self) -> str:
        """Slurm's number of the job."""
        return str(self.wait_for("submitted")["job"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return its events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for `count` events of a kind, and return the last one."""
        wait_until(lambda: len(self.of(kind)) >= count or bool(self._ended), what=f"{kind} event", within_s=120)
        assert len(self.of(kind)) >= count, f"{self._ended} {self.events[-5:]} {logs()}"
        return self.of(kind)[count - 1]

    def outcome(self) -> Outcome:
        """Wait for its end."""
        self._thread.join(180)
        assert self._ended, f"still followed: {self.events[-5:]} {logs()}"
        if isinstance(self._ended[0], Exception):
            raise self._ended[0]
        return self._ended[0]

    @property
    def states(self) -> list[str]:
        """The successive states of the job."""
        return [event["state"] for event in self.of("job")]


def logs() -> str:
    """Return the end of the standard error of all jobs' nodes."""
    return "\n".join(path.read_text()[-3000:] for path in Path().glob("slurm-*.err"))


@pytest.mark.slow
def test_range_takes_all_idle_nodes(arena: Arena, slurm: SlurmCluster) -> None:
    """A job of 2 to 3 nodes gets all three, and trains each row once."""
    arena.table(appends=(240,))
    following = FollowedJob(arena, nodes="2:3", batch_size=24, every_steps=5, last_call_s=60)
    outcome = following.outcome()
    assert (outcome.ending, outcome.step) == ("finished", 10)
    assert {row.world_size for row in arena.lineage("r1")} == {3}
    reported = {event["checkpoint_id"] for event in following.of("checkpoint")}
    assert reported == {row.checkpoint_id for row in arena.lineage("r1")}
    check_exact(arena, rows=240)


@pytest.mark.soak
def test_cancelled_job_leaves_checkpoint(arena: Arena, slurm: SlurmCluster) -> None:
    """`dlac train` cancels its job, whose nodes checkpoint. The next job trains the rest."""
    arena.table()
    stopped = FollowedJob(arena, nodes="2", **SLOW)
    stopped.wait_for("checkpoint")
    stopped.job.stop()
    assert stopped.outcome().ending == "stopped"
    done = arena.lineage("r1")[-1].step
    assert "JobState=CANCELLED" in slurm.job(stopped.number)
    assert FollowedJob(arena, nodes="2").outcome().ending == "finished"
    assert done < arena.lineage("r1")[-1].step
    check_exact(arena)


def strike(slurm: SlurmCluster, following: FollowedJob, fault: str) -> None:
    """Let a fault strike a job that trains."""
    if fault == "killed rank":
        processes = psutil.process_iter(["name", "cmdline"])
        next(one for one in processes if RANK.match(" ".join(one.info["cmdline"] or ()))).kill()
    elif fault == "preempted":
        slurm.ask("sbatch", "--partition=high", "--nodes=3", "--cpus-per-task=2", "--ntasks=3", "--wrap=sleep 5")
    elif fault == "controller":
        slurm.stop("slurmctld")
        following.wait_for("warning")
        slurm.start("slurmctld")
    else:
        slurm.lose(fault.removeprefix("lost "))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "nodes", "restarts", "claims"),
    [
        ("killed rank", "2", 0, 2),
        ("controller", "2", 0, 1),
        ("lost n3", "2:3", 0, 2),
        ("lost n1", "2:3", 1, 2),
        ("preempted", "2:3", 1, 2),
    ],
)
def test_job_outlives_fault(
    arena: Arena, slurm: SlurmCluster, fault: str, nodes: str, restarts: int, claims: int
) -> None:
    """The job continues, or is requeued if its batch script is lost or after a preemption. Each row is trained once."""
    arena.table()
    slow_s = 1.0 if fault == "lost n1" else 0.1  # training must outlast the controller's timeout of a node
    batch_size = 24 if nodes == "2:3" else 32
    following = FollowedJob(arena, nodes=nodes, batch_size=batch_size, slow_rank=0, slow_s=slow_s)
    following.wait_for("checkpoint")
    strike(slurm, following, fault)
    assert following.outcome().ending == "finished"
    assert f"Restarts={restarts}" in slurm.job(following.number)
    found = len(arena.rows("r1", ClaimRow))
    assert found >= claims if "lost" in fault else found == claims
    warnings = [event["message"] for event in following.of("warning")]
    assert any("has lost its first node" in each for each in warnings) == (fault == "lost n1")
    sizes, states = {row.world_size for row in arena.lineage("r1")}, following.states
    if fault == "controller":
        assert (sizes, len(warnings)) == ({2}, 1)
    if fault == "lost n3":
        assert sizes == {3, 2}
    if fault == "preempted":
        assert states.index("PREEMPTED") < states.index("PENDING", states.index("RUNNING"))
    check_exact(arena)


@pytest.mark.soak
@pytest.mark.parametrize("holder", ["idle", "lost"])
def test_resumed_job_gets_holder(arena: Arena, slurm: SlurmCluster, holder: str) -> None:
    """A run resumes on the node with its newest checkpoint. If that is lost, it gets another node after a short time."""
    arena.table()
    places: dict[str, Any] = {"store": str(arena.home / "far"), "local": str(arena.home / "near")}
    stopped = FollowedJob(arena, nodes="1", on_node="n3", **places, **SLOW)
    stopped.wait_for("checkpoint")
    stopped.job.stop()
    assert stopped.outcome().ending == "stopped"
    waits: dict[str, Any] = {"prefers_s": 2.0, **SLOW} if holder == "lost" else {}
    resumed = FollowedJob(arena, nodes="1", **waits, **places)
    if holder == "lost":
        resumed.wait_for("checkpoint")
        slurm.lose("n3")
    assert resumed.outcome().ending == "finished"
    required = "n3 .* NodeList=n3 " if holder == "idle" else r"\(null\) .* NodeList=n[12] "
    assert re.search(f" ReqNodeList={required}", slurm.job(resumed.number))
    check_exact(arena)
