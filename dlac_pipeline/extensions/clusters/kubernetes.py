"""Kubernetes: a JobSet, or a TrainJob of Kubeflow with the same pods, and a secret with the request, rendered from templates.

Pods prefer nodes that hold the newest checkpoint, if `checkpoint.local` is in a volume of the host, where copies outlive pods.
"""

import json
import secrets
import time
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import yaml

from dlac_pipeline.extensions.clusters.checks import NODE, check_kubernetes, writable_mounts
from dlac_pipeline.extensions.clusters.packed_request import pack
from dlac_pipeline.extensions.clusters.scheduler import ANSWER_S, JobState, job_name, leave_s
from dlac_pipeline.extensions.clusters.settings import ClusterSpec
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request

_GROUPS = {
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),
}
_JOBSET_LABEL, _INDEX_LABEL = "jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-completion-index"
_NODE_LABEL = "kubernetes.io/hostname"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_OVERLAP_S = 30
"""Seconds of log that are requested twice, for clocks that differ. A line is read once, by its time."""
Document = dict[str, Any]


class Kubernetes:
    """A job of one pod per node. A pod that is preempted or evicted is replaced, and the rest continue."""

    name = "Kubernetes"

    def __init__(self, request: Request) -> None:
        cluster = request.spec.section(ClusterSpec)
        self._namespace = cluster.namespace or "default"
        self._kind = "TrainJob" if cluster.kind == "trainjob" else "JobSet"
        self._read_to: dict[str, str] = {}
        self._read_at: float | None = None

    def check(self, spec: JobSpec) -> None:
        """Raise `SpecInvalid` for a setting that Kubernetes would ignore, or lose with a pod."""
        check_kubernetes(spec)

    def check_client(self) -> None:
        """Raise `BadInput` without the client of Kubernetes, which a job is rendered without."""
        if find_spec("kubernetes") is None:
            raise BadInput('expected the client of Kubernetes, found none: pip install "dlac-pipeline[cluster]"')

    def render(self, request: Request, near: Sequence[str] = ()) -> str:
        """Return the manifests, in which pods prefer the nodes in `near`. Asks no cluster."""
        return yaml.safe_dump_all(documents(request, near), sort_keys=False)

    def submit(self, request: Request, near: Sequence[str]) -> str:
        """Create the job, and the secret that its pods wait for. The job owns all further objects. Return its name."""
        secret, *others = documents(request, near)
        try:
            # one after the other: a TrainJob is refused before its runtime exists
            created = [self._custom("create", one["kind"], body=one, field_validation="Strict") for one in others]
            job = created[-1]["metadata"]
            owner = {name: others[-1][name] for name in ("apiVersion", "kind")}
            owner |= {"name": job["name"], "uid": job["uid"]}
            owned = {"metadata": {"ownerReferences": [owner]}}
            for document in others[:-1]:
                self._custom("patch", document["kind"], name=document["metadata"]["name"], body=owned)
            body, core = merged(secret, owned), _client("CoreV1Api")
            core.create_namespaced_secret(self._namespace, body, _request_timeout=ANSWER_S)
        except Exception:
            for document in others:
                self._custom("delete", document["kind"], name=document["metadata"]["name"])
            raise
        return str(job["name"])

    def state(self, job: str) -> JobState | None:
        """Return the job's state by its conditions."""
        found = self._custom("get", self._kind, name=job)
        if found is None:
            return None
        status = found.get("status") or {}
        true = {one["type"] for one in status.get("conditions") or [] if one["status"] == "True"}
        if "deletionTimestamp" in found["metadata"]:
            return JobState(name="CANCELLED")
        if over := true & {"Complete", "Completed", "Failed"}:
            return JobState(name="FAILED" if "Failed" in over else "COMPLETED", over=True)
        jobs = status.get("replicatedJobsStatus") or status.get("jobsStatus") or []
        return JobState(name="RUNNING" if any(one.get("active") for one in jobs) else "PENDING")

    def read(self, job: str) -> list[tuple[str, str]]:
        """Return the new content of the pods' logs. A pod that replaces another continues its log."""
        core, now = _client("CoreV1Api"), time.monotonic()
        since = {} if self._read_at is None else {"since_seconds": int(now - self._read_at) + _OVERLAP_S}
        options = {"container": NODE, "timestamps": True, "_preload_content": False, "_request_timeout": ANSWER_S}
        selector, pieces = f"{_JOBSET_LABEL}={job}", []
        pods = core.list_namespaced_pod(self._namespace, label_selector=selector, _request_timeout=ANSWER_S)
        for pod in pods.items:
            if pod.status.phase == "Pending":
                continue
            known = since if pod.metadata.uid in self._read_to else {}
            answer = core.read_namespaced_pod_log(pod.metadata.name, self._namespace, **options, **known)
            log = answer.data.decode(errors="replace")
            pieces.append((pod.metadata.labels[_INDEX_LABEL], self._new(pod.metadata.uid, log)))
        self._read_at = now
        return pieces

    def _new(self, pod: str, log: str) -> str:
        """Return the whole lines of a log that were not read yet. Each begins with its time."""
        read_to = self._read_to.get(pod, "")
        lines = [line for line in log.splitlines(keepends=True) if line.endswith("\n") and line.split(" ")[0] > read_to]
        self._read_to[pod] = lines[-1].split(" ")[0] if lines else read_to
        return "".join(lines)

    def requeue(self, job: str) -> None:
        """Do nothing: a lost pod is replaced, the first one too."""

    def cancel(self, job: str) -> None:
        """Delete the job: its pods get SIGTERM and their grace period."""
        self._custom("delete", self._kind, name=job, propagation_policy="Foreground")

    def _custom(self, verb: str, kind: str, **arguments: Any) -> Any:
        """Call the API of a custom resource. None: there is no such object to get or delete."""
        from kubernetes.client import ApiException

        group, version, plural = _GROUPS[kind]
        place = {"group": group, "version": version, "namespace": self._namespace, "plural": plural}
        call = getattr(_client("CustomObjectsApi"), f"{verb}_namespaced_custom_object")
        try:
            return call(**place, **arguments, _request_timeout=ANSWER_S)
        except ApiException as err:
            if err.status == 404 and verb in ("get", "delete"):
                return None
            raise


def _client(api: str) -> Any:
    """Return a client with the settings of the pod in which this process runs, or else of the user's kubeconfig."""
    from kubernetes import client, config

    config.load_config()
    return getattr(client, api)()


def documents(request: Request, near: Sequence[str] = ()) -> list[Document]:
    """Return the secret, then the objects that the cluster runs: the last document is the job."""
    launch, cluster = request.spec.launch, request.spec.section(ClusterSpec)
    name = f"{job_name(request)}-{secrets.token_hex(3)}"
    memory = cluster.memory_mb and f"{cluster.memory_mb}M"
    resources = {"cpu": cluster.cpu, "nvidia.com/gpu": cluster.gpu, "memory": memory}
    values: dict[str, object] = {
        "name": name,
        "request": pack(request),
        "rendezvous_key": secrets.token_hex(32),  # which the nodes of the job share
        "first_node": f"{name}-node-0-0.{name}",
        "labels": {_QUEUE_LABEL: cluster.queue} if cluster.queue else None,
        "least": launch.min_nodes,
        "most": launch.max_nodes,
        "time_limit_s": cluster.time_limit_s or None,
        "retries": cluster.retries,
        "leave_s": leave_s(request),
        "image": cluster.image,
        "python": cluster.python,
        "resources": {key: str(value) for key, value in resources.items() if value},
    }
    secret, jobset = _filled("jobset.yaml", values)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    for part in (_preference(request, near), cluster.pod):
        job["template"] = merged(job["template"], part)
    if cluster.kind == "trainjob":
        return [secret, *_filled("trainjob.yaml", {**values, "jobset_spec": jobset["spec"]})]
    return [secret, jobset]


def _preference(request: Request, nodes: Sequence[str]) -> Document:
    """Return a part of a pod by which it prefers nodes, where copies of checkpoints are in their folders and outlive pods."""
    cluster = request.spec.section(ClusterSpec)
    on_host = {each.get("name") for each in cluster.pod.get("spec", {}).get("volumes", []) if "hostPath" in each}
    mounts = [mount["mountPath"] for mount in writable_mounts(cluster) if mount.get("name") in on_host]
    if not nodes or not any(Path(request.spec.checkpoint.local).is_relative_to(path) for path in mounts):
        return {}
    named = {"key": _NODE_LABEL, "operator": "In", "values": [*nodes]}
    term = {"weight": 100, "preference": {"matchExpressions": [named]}}
    return {"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}}}


def _filled(template: str, values: dict[str, object]) -> list[Document]:
    """Return the documents of a template, with values written as JSON, which is YAML. Settings without a value are left out."""
    text = Template(files(__package__).joinpath(template).read_text())
    filled = text.substitute({key: json.dumps(value) for key, value in values.items()})
    return [_without_nulls(document) for document in yaml.safe_load_all(filled)]


def _without_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return [_without_nulls(value) for value in node] if isinstance(node, list) else node


def merged(base: Any, patch: Any) -> Any:
    """Return `base` with `patch` merged in: mappings by key, lists of named things by name, other lists by concatenation."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base[key], value) if key in base else value for key, value in patch.items()}
    if not (isinstance(base, list) and isinstance(patch, list)):
        return patch
    patches = {one["name"]: one for one in patch if isinstance(one, dict) and "name" in one}
    found = [merged(one, patches.pop(one.get("name"), {})) if isinstance(one, dict) else one for one in base]
    return [*found, *(one for one in patch if not isinstance(one, dict) or one.get("name") in {None, *patches})]
