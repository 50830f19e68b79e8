"""What the schedulers are told, in TorchX's terms: Slurm, and Kubernetes with Volcano.

In: a request. Out: TorchX's application and options, and what TorchX renders put right: a lost node must not end the others,
and who is told to leave gets the time that an emergency checkpoint takes.
"""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from catalog.errors import SpecInvalid
from dlac_pipeline.cluster_spec import ClusterSpec, MountSpec
from dlac_pipeline.launchers.node import REQUEST_VARIABLE, packed
from dlac_pipeline.request import Request
from dlac_pipeline.spec import JobSpec, home_folder

if TYPE_CHECKING:
    from torchx.schedulers.api import Stream
    from torchx.specs import AppDef

ROLE = "node"
"""Of every node, in TorchX's words."""
_MARGIN_S = 10
"""What a node gets on top of its ranks' time to leave."""
_NAME_LENGTH = 30
"""Of a job; Kubernetes allows 63, with what TorchX and Volcano append."""
_SIZES = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time"}
_OURS = _SIZES | {"partition", "account", "signal", "no-kill", "requeue", "job-name"}
"""Options of sbatch that the job spec says otherwise."""
_CUT_BY_SBATCH = r"[\s#'\"\\]"
_OVERHEARD = (
    'exec 3>&1; said=$("$0" "$@" 2>&1 >&3 3>&-) || { code=$?; echo "$said"; exit $code; }; '
    '[ -z "$said" ] || echo "$said" >&2'
)
"""For sh: runs a command whose words on standard error are on standard output where it fails."""
_OUR_POD = ("terminationGracePeriodSeconds", "activeDeadlineSeconds", "restartPolicy")
_OUR_CONTAINER = ("command", "args", "image")
"""Of the node's container."""
_SLURM_ONLY = ("partition", "account", "options")
_KUBERNETES_ONLY = ("queue", "namespace", "service_account", "priority_class", "mounts", "pod")


class Scheduler(Protocol):
    """A scheduler that TorchX knows."""

    @property
    def name(self) -> str:
        """TorchX's name of it."""

    @property
    def stream(self) -> Stream | None:
        """Where in its logs the nodes' events are."""

    @property
    def tails(self) -> bool:
        """Whether its logs can be followed; else they are read again and again."""

    @property
    def nodes(self) -> int:
        """Logs of a job."""

    def check(self, spec: JobSpec) -> None:
        """Refuse what the scheduler cannot do.

        Raises:
            SpecInvalid: the cluster section, or the lakehouse, is not for it.
        """

    def app(self, request: Request) -> AppDef:
        """The job."""

    def options(self, request: Request, *, render: bool) -> dict[str, Any]:
        """TorchX's options; to `render`, none that asks the cluster."""

    def amend(self, rendered: Any, request: Request) -> None:
        """Put right what TorchX rendered."""

    def doubts(self, spec: JobSpec) -> list[str]:
        """What may be wrong, and only the cluster knows."""

    def overhear(self, rendered: Any) -> None:
        """Prepare what is submitted so that `reason` finds what the scheduler says if it refuses."""

    def reason(self, err: Exception) -> str:
        """What the scheduler said when it refused a job; empty: no more than the error."""

    def forgot(self, job: str) -> bool:
        """Whether the scheduler itself says that there is no such job, where TorchX found none."""


def scheduler_of(spec: JobSpec) -> Scheduler:
    """The scheduler of a job spec.

    Raises:
        SpecInvalid: it cannot do what the spec says.
    """
    scheduler = Slurm() if spec.launch.on == "slurm" else Kubernetes(spec)
    scheduler.check(spec)
    return scheduler


class Slurm:
    """One job step with a task on each node, which outlives the loss of nodes."""

    name: ClassVar[str] = "slurm"
    tails: ClassVar[bool] = False
    nodes: ClassVar[int] = 1

    def __init__(self) -> None:
        from torchx.schedulers.api import Stream

        self.stream = Stream.STDOUT

    def check(self, spec: JobSpec) -> None:
        """Refuse what the scheduler cannot do."""
        _check_reachable(spec)
        _refuse(spec.cluster, _KUBERNETES_ONLY, "slurm")
        for name, value in spec.cluster.env.items():
            if re.search(r"[,\n]", value):
                raise SpecInvalid(
                    f"expected cluster.env.{name} without commas and line breaks, at which Slurm cuts it, found {value!r}: "
                    "set it where the job is submitted; Slurm hands that environment on"
                )
        in_script = {f"options.{name}": value for name, value in spec.cluster.options.items()}
        for name, said in {**in_script, "partition": spec.cluster.partition}.items():
            if re.search(_CUT_BY_SBATCH, said):
                raise SpecInvalid(
                    f"expected cluster.{name} without blanks, quotes, backslashes and '#', at which sbatch cuts a script's "
                    f"options, found {said!r}: write it without them"
                )
        taken = sorted(_OURS & set(spec.cluster.options))
        if taken:
            raise SpecInvalid(
                f"expected in cluster.options what nothing else in the job spec says, found {taken[0]!r}: leave it out"
            )

    def app(self, request: Request) -> AppDef:
        """The job: to TorchX a single task; Slurm itself counts nodes from the least to the most."""
        cluster = request.spec.cluster
        return _app(request, cpu=cluster.cpu, gpu=0, memory_mb=cluster.memory_mb, env=_literal(cluster.env))

    def options(self, request: Request, *, render: bool) -> dict[str, Any]:
        """TorchX's options."""
        cluster = request.spec.cluster
        limit_s = cluster.time_limit_s
        said = {
            "partition": cluster.partition,
            "account": cluster.account,
            "time": limit_s and f"{limit_s // 3600}:{limit_s // 60 % 60:02}:{limit_s % 60:02}",
        }
        return {name: value for name, value in said.items() if value}

    def amend(self, rendered: Any, request: Request) -> None:
        """Nodes, and their end: Slurm ends a job with its first lost node, and a step with the first task that fails."""
        launch, cluster = request.spec.launch, request.spec.cluster
        (task,) = rendered.replicas.values()
        task.name = f"{_name_of(request)}-0"  # TorchX reads a number off its end
        least, most = launch.min_nodes, launch.max_nodes
        task.sbatch_opts |= {
            "nodes": str(most) if least == most else f"{least}-{most}",
            "no-kill": None,
            "signal": f"TERM@{_leave_s(request)}",
            **{name: value or None for name, value in cluster.options.items()},
        }
        task.srun_opts |= {"wait": "0", "kill-on-bad-exit": "0", "no-kill": None, "cpus-per-task": str(cluster.cpu)}
        task.srun_opts["open-mode"] = "append"  # a job that is queued again goes on in the same files
        if cluster.gpu:
            task.sbatch_opts["gpus-per-node"] = str(cluster.gpu)
        if cluster.image:
            task.srun_opts["container-image"] = cluster.image

    def doubts(self, spec: JobSpec) -> list[str]:
        """What may be wrong: a store that nobody has named."""
        store = str((home_folder() / "checkpoints").resolve())
        if spec.checkpoint.store not in ("", store):
            return []
        return [
            f"expected checkpoint.store, which all nodes must reach, found none: checkpoints go to {store!r} of each node"
        ]

    def overhear(self, rendered: Any) -> None:
        """Have sbatch's words on standard output where it fails: TorchX reads nothing else of it."""
        rendered.cmd = ["sh", "-c", _OVERHEARD, *rendered.cmd]

    def reason(self, err: Exception) -> str:
        """What sbatch said when it refused a job."""
        return err.output.decode(errors="replace").strip() if isinstance(err, subprocess.CalledProcessError) else ""

    def forgot(self, job: str) -> bool:
        """Whether Slurm says that there is no such job: TorchX takes any failure of Slurm's commands for that."""
        asked = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True, check=False)
        if asked.returncode and "Invalid job id" not in asked.stderr:
            raise ConnectionError(asked.stderr.strip() or f"squeue ended with status {asked.returncode}")
        return not asked.stdout.strip()


class Kubernetes:
    """A Volcano job with a pod for each node, scheduled once the least number of them fits."""

    name: ClassVar[str] = "kubernetes"
    stream: ClassVar[None] = None
    tails: ClassVar[bool] = True

    def __init__(self, spec: JobSpec) -> None:
        self.nodes = spec.launch.max_nodes

    def check(self, spec: JobSpec) -> None:
        """Refuse what the scheduler cannot do."""
        _check_reachable(spec)
        _refuse(spec.cluster, _SLURM_ONLY, "kubernetes")
        if not spec.cluster.image:
            raise SpecInvalid(
                "expected cluster.image, the container image of the nodes, found none: name one with DLAC in it"
            )
        _check_pod(spec.cluster)
        _check_mounted(spec)

    def app(self, request: Request) -> AppDef:
        """The job."""
        from torchx.specs.overlays import set_overlay

        launch, cluster = request.spec.launch, request.spec.cluster
        ends = {"terminationGracePeriodSeconds": _leave_s(request)}
        if cluster.time_limit_s:
            ends["activeDeadlineSeconds"] = cluster.time_limit_s
        env = _literal(_literal(cluster.env))  # Kubernetes reads dollars as well
        app = _app(request, cpu=cluster.cpu, gpu=cluster.gpu, memory_mb=cluster.memory_mb, env=env)
        (role,) = app.roles
        role.num_replicas, role.min_replicas = launch.max_nodes, launch.min_nodes
        role.mounts = [_mount_of(mount) for mount in cluster.mounts]
        others = [one for one in _containers(cluster) if one["name"] != ROLE]  # `amend` says those of the node's own
        reaped = {"shareProcessNamespace": True}  # a supervisor would be process 1, and collect no orphans
        spec = {**reaped, **cluster.pod.get("spec", {}), "containers": others, **ends}
        set_overlay(role, "kubernetes", "V1Pod", {**cluster.pod, "spec": spec})
        return app

    def options(self, request: Request, *, render: bool) -> dict[str, Any]:
        """TorchX's options; the cluster checks the job before it takes it."""
        cluster = request.spec.cluster
        said = {
            "namespace": cluster.namespace,
            "service_account": cluster.service_account,
            "priority_class": cluster.priority_class,
        }
        named = {name: value for name, value in said.items() if value}
        # what is asked for is requested: TorchX would leave room for a machine's own needs, as if a pod were a machine
        return {**named, "queue": cluster.queue or "default", "reserved_millicpu": 0, "reserved_memmb": 0} | {
            "validate_spec": not render
        }

    def amend(self, rendered: Any, request: Request) -> None:
        """What is said of a node's own container, which TorchX names differently in each pod."""
        from torchx.schedulers.kubernetes_scheduler import sanitize_for_serialization
        from torchx.specs.overlays import apply_overlay

        for said in _containers(request.spec.cluster):
            if said["name"] == ROLE:
                rendered.resource = sanitize_for_serialization(rendered.resource)
                for task in rendered.resource["spec"]["tasks"]:
                    node = task["template"]["spec"]["containers"][0]
                    apply_overlay(node, {**said, "name": node["name"]})

    def doubts(self, spec: JobSpec) -> list[str]:
        """Nothing: what pods reach is in the job spec."""
        return []

    def overhear(self, rendered: Any) -> None:
        """Nothing: the client of Kubernetes raises what it is told."""

    def reason(self, err: Exception) -> str:
        """Nothing more than the error."""
        return ""

    def forgot(self, job: str) -> bool:
        """TorchX finds no job where Kubernetes says that there is none."""
        return True


def _app(request: Request, *, cpu: int, gpu: int, memory_mb: int, env: dict[str, str]) -> AppDef:
    from torchx.specs import AppDef, Resource, Role

    role = Role(
        name=ROLE,
        image=request.spec.cluster.image,
        entrypoint=request.spec.cluster.python,
        args=["-m", "dlac_pipeline.launchers.node"],
        env={**env, REQUEST_VARIABLE: packed(_for_nodes(request))},
        resource=Resource(cpu=cpu, gpu=gpu, memMB=memory_mb),
        max_retries=request.spec.cluster.retries,
    )
    return AppDef(name=_name_of(request), roles=[role])


def _for_nodes(request: Request) -> Request:
    """With the ranks of a node, where it has accelerators."""
    spec = request.spec
    if not spec.launch.nodes or spec.launch.nproc_per_node or not spec.cluster.gpu:
        return request
    launch = spec.launch.model_copy(update={"nproc_per_node": spec.cluster.gpu})
    return request.model_copy(update={"spec": spec.model_copy(update={"launch": launch})})


def _name_of(request: Request) -> str:
    return f"dlac-{re.sub('[^a-z0-9]+', '-', request.spec.run.lower())}"[:_NAME_LENGTH].rstrip("-")


def _leave_s(request: Request) -> int:
    """Whole seconds from SIGTERM until a node is gone."""
    return math.ceil(request.spec.launch.leave_s) + _MARGIN_S


def _mount_of(mount: MountSpec) -> Any:
    from torchx.specs import BindMount, VolumeMount

    if mount.kind == "claim":
        return VolumeMount(src=mount.source, dst_path=mount.path, read_only=mount.read_only)
    return BindMount(src_path=mount.source, dst_path=mount.path, read_only=mount.read_only)


def _check_reachable(spec: JobSpec) -> None:
    if spec.lakehouse.uri.startswith("sqlite"):
        raise SpecInvalid(
            f"expected lakehouse.uri that the nodes of the job reach, found {spec.lakehouse.uri!r}, which serves one host: "
            "name a PostgreSQL or a REST catalog"
        )


def _check_mounted(spec: JobSpec) -> None:
    """Refuse folders of a pod's own, which end with it: the next pod would find no checkpoint, nor any table."""
    mounts = [Path(mount.path) for mount in spec.cluster.mounts if not mount.read_only]
    for container in _containers(spec.cluster):
        added = container.get("volumeMounts", []) if container["name"] == ROLE else []
        mounts += [Path(mount["mountPath"]) for mount in added if not mount.get("readOnly")]
    for name, place in {
        "checkpoint.store": spec.checkpoint.store,
        "lakehouse.warehouse": spec.lakehouse.warehouse,
    }.items():
        folder = place.removeprefix("file://").removeprefix("file:")
        if folder.startswith("/") and not any(Path(folder).is_relative_to(mount) for mount in mounts):
            raise SpecInvalid(
                f"expected {name} that all pods reach, found {place!r}, in no folder that they mount to write: name a bucket, or "
                "a folder in one of cluster.mounts"
            )


def _check_pod(cluster: ClusterSpec) -> None:
    """Refuse what would change nothing, and what DLAC says itself."""
    said = [f"cluster.pod.{name}" for name in cluster.pod if name not in ("metadata", "spec")]
    said += [f"cluster.pod.spec.{name}" for name in cluster.pod.get("spec", {}) if name in _OUR_POD]
    said += [
        f"cluster.pod.spec.containers.{name}" for one in _containers(cluster) for name in one if _is_ours(one, name)
    ]
    if said:
        raise SpecInvalid(
            f"expected no {said[0]}, which Kubernetes ignores there or DLAC says itself (launch.deadline_s, "
            "cluster.time_limit_s, retries, image, python, env): leave it out"
        )


def _containers(cluster: ClusterSpec) -> list[dict[str, Any]]:
    """What is said of a pod's containers."""
    containers = cluster.pod.get("spec", {}).get("containers", [])
    if not all(isinstance(one, dict) and one.get("name") for one in containers):
        raise SpecInvalid(
            f"expected a name for each of cluster.pod.spec.containers ({ROLE!r}: the node's own), found {containers!r}"
        )
    return list(containers)


def _is_ours(container: dict[str, Any], name: str) -> bool:
    return container["name"] == ROLE and name in _OUR_CONTAINER


def _literal(env: dict[str, str]) -> dict[str, str]:
    """Variables whose dollars survive one reading of them."""
    return {name: value.replace("$", "$$") for name, value in env.items()}


def _refuse(cluster: ClusterSpec, names: tuple[str, ...], on: str) -> None:
    """Refuse settings of another scheduler: they would change nothing."""
    for name in names:
        if value := getattr(cluster, name):
            raise SpecInvalid(f"expected no cluster.{name} with launch.on = {on!r}, found {value!r}: leave it out")
