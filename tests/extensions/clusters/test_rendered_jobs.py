import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlac_pipeline.extensions.clusters import kubernetes
from dlac_pipeline.extensions.clusters.node_process import for_node
from dlac_pipeline.extensions.clusters.packed_request import pack, unpack
from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.launchers.protocol import launcher_for, render_job
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from tests.extensions.clusters.cluster import GOOD, SLURM, cluster_request

pytestmark = pytest.mark.usefixtures("only_this_process")

SCRATCH = {"name": "scratch", "persistentVolumeClaim": {"claimName": "scratch"}}
PASSWORDS = {"name": "passwords", "secret": {"secretName": "postgres", "defaultMode": 0o400}}
MOUNTS = [
    {"name": "scratch", "mountPath": "/scratch"},
    {"name": "passwords", "mountPath": "/secrets/postgres", "readOnly": True},
]
PODS = {
    **{"nodeSelector": {"pool": "h100"}, "serviceAccountName": "trainer", "volumes": [SCRATCH, PASSWORDS]},
    "containers": [{"name": "node", "volumeMounts": MOUNTS}],
}
KUBERNETES: dict[str, Any] = {
    **{"image": "registry.example/dlac:1", "cpu": 8, "gpu": 4, "memory_mb": 64_000, "queue": "train"},
    **{"namespace": "ml", "time_limit_s": 3600, "retries": 2, "pod": {"spec": PODS}},
}


def pod(spec: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a cluster with the spec of a pod."""
    return {"image": "i", "pod": {"spec": spec}}


def manifests(cluster: Mapping[str, Any], **launch: Any) -> dict[str, Any]:
    """Return the manifests that are rendered for Kubernetes, by kind."""
    text = render_job(cluster_request("kubernetes", {"image": "i", **cluster}, **launch))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def job_of(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only job of a JobSet."""
    (job,) = jobset["spec"]["replicatedJobs"]
    return dict(job["template"])


def test_jobset_satisfies_schemas() -> None:
    """The strict schema of Kubernetes accepts the job with its pods, and the official model of a JobSet drops no field."""
    from kubeflow_trainer_api import models  # seconds, for every process that collects tests
    from kubernetes_validate import validate

    found = manifests(KUBERNETES)
    assert list(found) == ["Secret", "JobSet"]
    jobset = found["JobSet"]
    model = models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert model is not None
    assert model.to_dict() == jobset
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": job_of(jobset)["spec"]}
    validate(job, "1.37", strict=True)
    validate(found["Secret"], "1.37", strict=True)


def test_trainjob_satisfies_schemas() -> None:
    """The official models of a runtime with the same pods, and of a TrainJob that starts it, drop no field."""
    from kubeflow_trainer_api import models

    found = manifests({**KUBERNETES, "kind": "trainjob"})
    assert list(found) == ["Secret", "TrainingRuntime", "TrainJob"]
    runtime = models.TrainerV1alpha1TrainingRuntime.from_dict(found["TrainingRuntime"])
    job = models.TrainerV1alpha1TrainJob.from_dict(found["TrainJob"])
    assert runtime is not None
    assert job is not None
    assert runtime.to_dict() == found["TrainingRuntime"]
    assert job.to_dict() == found["TrainJob"]
    assert job.spec is not None
    assert job.spec.runtime_ref.name == found["TrainingRuntime"]["metadata"]["name"]
    template = found["TrainingRuntime"]["spec"]["template"]
    assert job_of(template)["spec"]["completions"] == 4
    assert job_of(template)["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_pods_get_time_to_checkpoint() -> None:
    """The grace period is the deadline, a preempted pod is replaced, and the job succeeds with its minimum number of nodes."""
    jobset = manifests(KUBERNETES)["JobSet"]
    job = job_of(jobset)["spec"]
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "train"}
    assert (job["parallelism"], job["completions"], job["backoffLimitPerIndex"]) == (4, 4, 2)
    assert job["activeDeadlineSeconds"] == 3600
    assert job["successPolicy"] == {"rules": [{"succeededCount": 2}]}
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    pod = job["template"]["spec"]
    assert (pod["terminationGracePeriodSeconds"], pod["restartPolicy"]) == (100, "Never")
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("trainer", {"pool": "h100"})
    (container,) = pod["containers"]
    assert container["command"] == ["python3", "-m", "dlac_pipeline.extensions.clusters.node_process"]
    expected = {"cpu": "8", "memory": "64000M", "nvidia.com/gpu": "4"}
    assert container["resources"] == {"limits": expected, "requests": expected}


def test_secrets_are_files() -> None:
    """The request is in its own secret, mounted as a folder beside the volumes of the user."""
    found = manifests(KUBERNETES)
    pod = job_of(found["JobSet"])["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    assert mounted == {"/etc/dlac": True, "/dev/shm": None, "/scratch": None, "/secrets/postgres": True}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["request"]["secret"]["secretName"] == found["Secret"]["metadata"]["name"]
    assert volumes["passwords"]["secret"] == {"secretName": "postgres", "defaultMode": 0o400}
    environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert environment["DLAC_REQUEST_FILE"] == "/etc/dlac/request"
    assert "DLAC_REQUEST" not in environment


@pytest.mark.parametrize(
    ("on", "cluster", "message"),
    [
        ("slurm", {"pod": KUBERNETES["pod"]}, r"expected no cluster\.pod with launch\.on = 'slurm'"),
        ("slurm", {"namespace": "ml"}, r"expected no cluster\.namespace .* found 'ml'"),
        ("slurm", {"options": {"signal": "B:USR1"}}, r"cluster\.options .* found 'signal'"),
        ("slurm", {"time_limit_s": -1}, r"cluster\.time_limit_s: .*found -1"),
        ("slurm", {"options": {"comment": "two words"}}, r"options\.comment without blanks.* found 'two words'"),
        ("kubernetes", {"image": "i", "pod": {"foo": {}}}, r"expected no cluster\.pod\.foo"),
        ("kubernetes", pod({"terminationGracePeriodSeconds": 600}), r"pod\.spec\.terminationGracePeriodSeconds"),
        ("kubernetes", {}, r"expected cluster\.image"),
        ("here", {}, r"expected launch\.on = 'kubernetes' or 'slurm'"),
    ],
)
def test_impossible_cluster_is_refused(on: str, cluster: dict[str, Any], message: str) -> None:
    """Settings of another scheduler, values that it would cut, and options that DLAC sets itself are refused by name."""
    with pytest.raises(SpecInvalid, match=message):
        render_job(cluster_request(on, cluster, rendezvous="h:1"))


def test_local_lakehouse_is_refused(tmp_path: Path) -> None:
    """Other nodes cannot reach an embedded catalog."""
    raw = cluster_request("slurm", {}).spec.model_dump() | {"lakehouse": {}}
    with pytest.raises(SpecInvalid, match=r"expected lakehouse\.uri that the nodes of the job reach, found 'sqlite:"):
        launcher_for(Request(spec=parse_spec(raw, origin="the test").resolved(tmp_path)), print)


def test_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job can be rendered, but not submitted, without the client of Kubernetes."""
    monkeypatch.setattr(kubernetes, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install \"dlac-pipeline\[cluster\]\""):
        launcher_for(cluster_request("kubernetes", KUBERNETES), print)
    assert "kind: JobSet" in render_job(cluster_request("kubernetes", KUBERNETES))


def test_node_meets_at_first() -> None:
    """Each job has a port of its own. A node has as many ranks as accelerators, or as the spec says."""
    environment = {"DLAC_FIRST_NODE": "gpu01", "DLAC_RENDEZVOUS_KEY": "a"}
    launch = for_node(cluster_request("slurm", {"gpu": 4}), environment).spec.launch
    other = for_node(cluster_request("slurm", {}), {**environment, "DLAC_RENDEZVOUS_KEY": "b"}).spec.launch
    assert re.fullmatch("gpu01:2[0-9]{4}", launch.rendezvous)
    assert launch.rendezvous != other.rendezvous
    assert launch.nproc_per_node == 4
    assert for_node(cluster_request("slurm", {"gpu": 4}, nproc_per_node=2), environment).spec.launch.nproc_per_node == 2
    assert for_node(cluster_request("slurm", {"gpu": 4}, nodes=""), environment).spec.launch.nproc_per_node == 0


def test_job_has_its_own_key() -> None:
    """The secret of the nodes' messages belongs to one job. On Kubernetes it is a file."""
    keys = [re.findall("export DLAC_RENDEZVOUS_KEY=(.*)", render_job(cluster_request("slurm", {}))) for _ in range(2)]
    assert keys[0] != keys[1]
    assert len(manifests({})["Secret"]["stringData"]["rendezvous-key"]) == 64
    environment = {"DLAC_RENDEZVOUS_KEY_FILE": "/etc/dlac/rendezvous-key"}
    launch = for_node(cluster_request("kubernetes", {"image": "i"}), environment).spec.launch
    assert launch.rendezvous_key_file == "/etc/dlac/rendezvous-key"


def test_request_is_one_word() -> None:
    """The encoded request has no special character of a shell or scheduler, and decodes to the same request."""
    request = cluster_request("slurm", SLURM)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", pack(request))
    assert unpack({"DLAC_REQUEST": pack(request)}) == request
    for wrong in ({}, {"DLAC_REQUEST": "x"}, {"DLAC_REQUEST": pack(request)[:-9]}):
        with pytest.raises(SpecInvalid, match="expected a request of this DLAC"):
            unpack(wrong)


def test_node_container_is_merged() -> None:
    """The container named `node` is merged into the pod's own, and others are added."""
    secret = {"secretRef": {"name": "db"}}
    volume = {"name": "key", "secret": {"secretName": "key"}}
    mounts = [{"name": "key", "mountPath": "/key"}]
    node = {"name": "node", "env": [{"name": "A", "value": "1"}], "envFrom": [secret], "volumeMounts": mounts}
    found = manifests({"pod": {"spec": {"containers": [{"name": "log"}, node], "volumes": [volume]}}})
    pod = job_of(found["JobSet"])["spec"]["template"]["spec"]
    own, other = pod["containers"]
    assert (own["name"], own["image"], other["name"]) == ("node", "i", "log")
    assert own["envFrom"] == [secret]
    assert {mount["mountPath"] for mount in own["volumeMounts"]} == {"/etc/dlac", "/dev/shm", "/key"}
    assert {"A", "DLAC_REQUEST_FILE"} <= {one["name"] for one in own["env"]}
    assert volume in pod["volumes"]


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ("checkpoint", {"store": "/scratch/ckpt"}),
        ("lakehouse", {**GOOD["lakehouse"], "warehouse": "file:///scratch/w"}),
    ],
)
def test_pod_local_folder_is_refused(section: str, place: dict[str, str]) -> None:
    """The store must be in a writable mount."""

    def job(**mount: Any) -> Request:
        container = {"name": "node", "volumeMounts": [{"name": "claim", "mountPath": "/scratch", **mount}]}
        cluster = {"image": "i", "pod": {"spec": {"containers": [container]}}}
        raw = {**GOOD, "launch": {**GOOD["launch"], "on": "kubernetes"}, "cluster": cluster}
        return Request(spec=parse_spec(raw | {section: place}, origin="the test"))

    render_job(job())
    for other in ({"mountPath": "/scratch2"}, {"readOnly": True}):
        with pytest.raises(SpecInvalid, match=r"that all pods reach, found '(file://)?/scratch/"):
            render_job(job(**other))
