"""Runs as Kubernetes jobs: the official client uses a small API server, which runs each pod as a local process."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.clusters.cluster_job import ClusterJob
from dlac_pipeline.extensions.clusters.kubernetes import Kubernetes
from dlac_pipeline.lakehouse.errors import ClusterRefused
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Outcome
from tests.conftest import Arena, wait_until
from tests.extensions.clusters.cluster import check_exact
from tests.extensions.clusters.kubernetes_api import Cluster, kubernetes_api, use_configuration

Events = list[dict[str, Any]]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """An API server that the client's configuration names."""
    with kubernetes_api(tmp_path, monkeypatch) as running:
        yield running


def job_of(
    arena: Arena, *, nodes: str, cluster: dict[str, Any] | None = None, **changes: Any
) -> tuple[ClusterJob, Events]:
    """Return a job of several nodes with a rank each, and the events that it reports."""
    spec = arena.spec("r1", on="kubernetes", nodes=nodes, nproc_per_node=1, passes=1, **changes)
    given = {"image": "i", "python": sys.executable, **(cluster or {})}
    request = Request(spec=parse_spec(spec.model_dump() | {"cluster": given}, origin="the test"), repin=True)
    events: Events = []
    return ClusterJob(request, Kubernetes(request), events.append, look_s=0.3), events


def start_job(job: ClusterJob) -> Callable[[], Outcome]:
    """Run the job on a thread, and return a function that waits for its outcome."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(job.run()))
    thread.start()

    def outcome() -> Outcome:
        thread.join(150)
        return found[0]

    return outcome


def program(folder: Path, text: str) -> str:
    """Return a program that replaces the nodes' Python."""
    path = folder / "node"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("kind", ["jobset", pytest.param("trainjob", marks=pytest.mark.slow)])
def test_pods_are_followed(arena: Arena, cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """The API server checks each field, and the job owns all other objects. Each pod's events are reported once."""
    done = '{"event": "ended", "ending": "finished", "attempts": 2, "step": 9}'
    python = program(tmp_path, f"""echo '{{"event": "step", "step": 1}}'; sleep 1; echo '{done}'""")
    job, events = job_of(arena, nodes="2", cluster={"python": python, "kind": kind})
    assert job.run() == Outcome(ending="finished", attempts=2, step=9)
    assert [event["event"] for event in events].count("step") == 2
    name = events[0]["job"]
    assert [event["state"] for event in events if event["event"] == "job"] == ["RUNNING", "COMPLETED"]
    assert cluster.checked == (["JobSet"] if kind == "jobset" else ["TrainingRuntime", "TrainJob"])
    owner = cluster.objects["secrets", name]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster.objects[f"{kind}s", name]["metadata"]["uid"]


def test_cancelled_pods_get_sigterm(arena: Arena, cluster: Cluster, tmp_path: Path) -> None:
    """The job is deleted, and followed until its pods are deleted."""
    left = '{"event": "ended", "ending": "stopped", "attempts": 1, "step": 5}'
    python = program(tmp_path, f"trap \"echo '{left}'; exit 3\" TERM; while :; do sleep 0.1; done")
    job, events = job_of(arena, nodes="1", cluster={"python": python})
    outcome = start_job(job)
    wait_until(lambda: any(event["event"] == "job" for event in events), what="the job")
    job.stop()
    assert outcome().ending == "stopped"
    assert "jobsets" not in {plural for plural, _ in cluster.objects}


def test_expired_credentials_are_named(arena: Arena, cluster: Cluster, tmp_path: Path) -> None:
    """Nothing is created."""
    expired = tmp_path / "expired"
    expired.write_text((tmp_path / "kubeconfig").read_text().replace("token-of-the-test", "expired"))
    use_configuration(expired, arena.monkeypatch)
    job, _ = job_of(arena, nodes="1")
    with pytest.raises(ClusterRefused, match=r"expected Kubernetes to take the job of run 'r1', found .*401"):
        job.run()
    assert cluster.objects == {}


@pytest.mark.parametrize("refused", ["TrainJob", "Secret"])
def test_refused_job_leaves_nothing(arena: Arena, cluster: Cluster, refused: str) -> None:
    """Objects that were created before are deleted."""
    cluster.refused = refused
    job, _ = job_of(arena, nodes="1", cluster={"kind": "trainjob"})
    with pytest.raises(ClusterRefused):
        job.run()
    assert cluster.checked
    assert cluster.objects == {}


@pytest.mark.soak
def test_stopped_job_is_resumed(arena: Arena, cluster: Cluster) -> None:
    """Two nodes of a cancelled job checkpoint and exit. The next job trains the remaining rows, each once."""
    arena.table()
    stopped, events = job_of(arena, nodes="2", slow_rank=0, slow_s=0.05)
    outcome = start_job(stopped)
    wait_until(lambda: any(event["event"] == "checkpoint" for event in events), what="a checkpoint")
    stopped.stop()
    assert outcome().ending == "stopped"
    done = arena.lineage("r1")[-1].step
    again, later = job_of(arena, nodes="2")
    assert again.run().ending == "finished"
    assert done < arena.lineage("r1")[-1].step
    reported = {event["checkpoint_id"] for event in events + later if event["event"] == "checkpoint"}
    assert reported == {row.checkpoint_id for row in arena.lineage("r1")}
    assert {row.world_size for row in arena.lineage("r1")} == {2}
    check_exact(arena)
