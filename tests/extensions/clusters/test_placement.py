"""Placement of a job on nodes with the newest checkpoint: which nodes they are, and what each scheduler receives."""

import re
from typing import Any

import pytest
import yaml

from dlac_pipeline.checkpoint.commit.local_copies import holders_of
from dlac_pipeline.extensions.clusters import slurm
from dlac_pipeline.extensions.clusters.cluster_job import ClusterJob, nodes_with_newest
from dlac_pipeline.extensions.clusters.kubernetes import Kubernetes
from dlac_pipeline.extensions.clusters.slurm import Slurm
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow
from dlac_pipeline.spec.launch_request import Request
from tests.conftest import Arena
from tests.extensions.clusters.cluster import COMPLETED, Scripted, cluster_request

pytestmark = pytest.mark.usefixtures("only_this_process")

HOST, CLAIM = {"hostPath": {"path": "/nvme"}}, {"persistentVolumeClaim": {"claimName": "claim"}}
FACTS = "JobId=7 JobState={} ReqNodeList={} NodeList= BatchHost=n1\n"


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Yield a list of Slurm's commands and sbatch's scripts. The commands report that n2 and n3 are idle."""
    calls: list[str] = []

    def answer(*command: str, script: str | None = None) -> str:
        calls.append(" ".join(command) + (f"\n{script}" if script else ""))
        return {"sinfo": "n2 idle\nn1 down\nn3 idle\n", "sbatch": "7\n"}.get(command[0], "")

    monkeypatch.setattr(slurm, "answer_of", answer)
    return calls


def required(script: str) -> list[str]:
    """Return the nodes that a batch script requires."""
    found = re.findall(r"^#SBATCH --nodelist=(.*)$", script, re.MULTILINE)
    return [node for each in found for node in each.split(",")]


def request_on_kubernetes(**cluster: Any) -> Request:
    """Return a request whose local copies are below /nvme."""
    request = cluster_request("kubernetes", {"image": "i", **cluster})
    checkpoint = request.spec.checkpoint.model_copy(update={"local": "/nvme/checkpoints"})
    return request.model_copy(update={"spec": request.spec.model_copy(update={"checkpoint": checkpoint})})


def mounting(volume: dict[str, Any], **mount: Any) -> dict[str, Any]:
    """Return the spec of pods that mount a volume at /nvme."""
    node = {"name": "node", "volumeMounts": [{"name": "local", "mountPath": "/nvme", **mount}]}
    return {"volumes": [{"name": "local", **volume}], "containers": [node]}


def pod_of(text: str) -> dict[str, Any]:
    """Return the pods' template in rendered manifests."""
    (jobset,) = (document for document in yaml.safe_load_all(text) if document["kind"] == "JobSet")
    template: dict[str, Any] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return template


def test_largest_holder_is_first() -> None:
    """Nodes are ordered by the bytes that their ranks wrote. An adopted checkpoint has no rank."""
    votes = [{"node": node, "files": [{"bytes": size}]} for node, size in (("a", 5), ("b", 4), ("b", 4), ("", 99))]
    assert holders_of(votes) == ["b", "a"]


def test_ledger_names_holders(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint of an attempt records its nodes, which a job for the run prefers. They have the later ones too."""
    arena.table(appends=(120,), row_group_rows=20)
    places = {"store": str(arena.home / "far"), "local": str(arena.home / "near")}
    spec = arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=2, passes=1, **places)
    for name, until, before in (("n1", 6, []), ("n2", None, ["n1"])):
        ClusterJob(Request(spec=spec), scheduler := Scripted(COMPLETED)).submit()
        assert scheduler.near == before
        monkeypatch.setenv("SLURMD_NODENAME", name)
        arena.train(spec, until=until)
        rows = Ledger(arena.lakehouse).rows("r1", kinds=HEAD_KINDS)
        assert nodes_with_newest(rows) == [name]
    nodes = [row.nodes for row in rows if isinstance(row, CheckpointRow)]
    assert [list(each) for each in nodes] == [["n1"], [], ["n2"], []]


def test_slurm_requires_idle_holders(idle: list[str]) -> None:
    """A job requires the idle nodes among the holders, in their order, and at most its number of nodes."""
    Slurm().submit(cluster_request("slurm", {"options": {"partition": "h100"}}, nodes="1"), near=["n1", "n3", "n2"])
    assert idle[0].startswith("sinfo --noheader --Node")
    assert idle[0].endswith("--nodes=n1,n3,n2 --partition=h100")
    assert required(idle[1]) == ["n3"]


def test_refused_holders_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that Slurm refuses on these nodes is submitted without them. A job refused for another reason is refused."""
    refusal = ["Requested node configuration is not available", "Invalid account"]
    scripts: list[str] = []

    def answer(*command: str, script: str | None = None) -> str:
        if command[0] == "sinfo":
            return "n2 idle\n"
        scripts.append(script or "")
        if required(scripts[-1]):
            raise ConnectionError(refusal[0])
        return "7\n"

    monkeypatch.setattr(slurm, "answer_of", answer)
    assert Slurm().submit(cluster_request("slurm", {}), near=["n2"]) == "7"
    assert [required(script) for script in scripts] == [["n2"], []]
    refusal.pop(0)
    with pytest.raises(ConnectionError, match="Invalid account"):
        Slurm().submit(cluster_request("slurm", {}), near=["n2"])


@pytest.mark.parametrize(
    ("near", "state", "dropped"),
    [(["n2"], "PENDING", True), (["n2"], "RUNNING", False), ([], "PENDING", False)],
    ids=["pending", "running", "required by the user"],
)
def test_pending_job_drops_holders(monkeypatch: pytest.MonkeyPatch, near: list[str], state: str, dropped: bool) -> None:
    """A pending job drops its nodes after a short time. Nodes that a user requires stay required."""
    calls: list[str] = []

    def answer(*command: str, script: str | None = None) -> str:
        calls.append(" ".join(command))
        answers = {"sinfo": "n2 idle\n", "sbatch": "7\n", "scontrol --oneliner": FACTS.format(state, "n2")}
        return next((text for start, text in answers.items() if calls[-1].startswith(start)), "n1\n")

    monkeypatch.setattr(slurm, "answer_of", answer)
    client = Slurm(prefers_s=0.0)
    client.submit(cluster_request("slurm", {}), near=near)
    client.state("7")
    assert ("scontrol update JobId=7 ReqNodeList=" in calls) == dropped


def test_pods_prefer_holders() -> None:
    """The Kubernetes scheduler prefers these nodes for the pods, together with the user's preferences."""
    from kubernetes_validate import validate  # its import takes seconds in every process that collects tests

    mine = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}
    rule = {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [mine]}}}
    request = request_on_kubernetes(pod={"spec": {**mounting(HOST), **rule}})
    template = pod_of(Kubernetes(request).render(request, near=["k2", "k1"]))
    ours, theirs = template["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    named = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["k2", "k1"]}
    assert (ours, theirs) == ({"weight": 100, "preference": {"matchExpressions": [named]}}, mine)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template["spec"]}
    validate(pod, "1.31", strict=True)
    (container,) = template["spec"]["containers"]
    assert {"name": "DLAC_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in container["env"]


@pytest.mark.parametrize(
    "pod", [{}, mounting(HOST, readOnly=True), mounting(CLAIM)], ids=["none", "read only", "claim"]
)
def test_pods_without_copies_prefer_nothing(pod: dict[str, Any]) -> None:
    """A copy in a pod's own folder is lost with the pod, and one on a claim is equally near from each node."""
    request = request_on_kubernetes(pod={"spec": pod})
    assert "affinity" not in pod_of(Kubernetes(request).render(request, near=["k1"]))["spec"]
