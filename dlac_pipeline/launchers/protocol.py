"""Launchers: they run a job to its end, on the target that `launch.on` names. And their interface to the scheduler of a cluster.

The launcher of a cluster submits a job in which every node runs a supervisor, and follows it. Settings that a scheduler would
ignore, cut, or lose with a pod are refused by name.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_setting
from dlac_pipeline.lakehouse.named_catalogs import configured
from dlac_pipeline.spec.job_spec import JobSpec, home_folder, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.launch_spec import ClusterSpec
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from dlac_pipeline.extensions.clusters.cluster_job import ClusterJob

Launcher: TypeAlias = "Supervisor | ClusterJob"
"""Runs one request, by `run`. From any thread, `stop` asks for an orderly end of the run, and `leave` of this node's part."""
UNFINISHED_EXIT_CODE = 3
"""Exit status of a node that was asked to exit before the run was finished. Less than the status of every DlacError."""
FIRST_NODE_VARIABLE = "DLAC_FIRST_NODE"
"""Environment variable with the address of the node that serves the rendezvous."""
KEY_FILE_VARIABLE = "DLAC_RENDEZVOUS_KEY_FILE"
"""Environment variable that names a file with the secret of the rendezvous."""
ANSWER_S = 60.0
"""Seconds until a request to a scheduler counts as unanswered. The client has no limit of its own on a broken network."""
_MARGIN_S = 10
"""Seconds that a node gets in addition to the time its ranks have to leave."""
_OF_SLURM = ("partition", "account", "options")
_OF_KUBERNETES = ("queue", "namespace", "service_account", "priority_class", "mounts", "pod")
_OURS = {
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time", "partition", "account"),
    *("signal", "no-kill", "requeue", "no-requeue", "job-name", "output", "error", "open-mode"),
}
"""Options of sbatch that the template or another setting gives."""
_CUT_BY_SBATCH = r"[\s#'\"\\]"
_OUR_POD = ("terminationGracePeriodSeconds", "activeDeadlineSeconds", "restartPolicy")
_OUR_CONTAINER = ("command", "args", "image")
NODE = "node"
"""Name of the node's own container in `cluster.pod`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """State of a job as its scheduler reports it."""

    name: str
    over: bool = False
    """No process of the job is left, and the scheduler will start none."""
    first_node_lost: bool = False
    """Slurm: the node of the batch script is lost, so that nothing will ever end the job."""


class Scheduler(Protocol):
    """The client of a scheduler. Each method may raise whatever its commands or its library raise."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def render(self, request: Request, near: Sequence[str] = ()) -> str:
        """Return the job as text. Asks no cluster. `near`: preferred nodes."""

    def submit(self, request: Request, near: Sequence[str]) -> str:
        """Submit the job and return its id. It gets nodes of `near` where they are free: they hold the newest checkpoint."""

    def state(self, job: str) -> JobState | None:
        """Return the job's state. None: the scheduler answered, and knows no such job."""

    def read(self, job: str) -> list[tuple[str, str]]:
        """Return what the job's logs have gained since the last call: the name of each log, and a piece of text."""

    def requeue(self, job: str) -> None:
        """Have the job end and start again."""

    def cancel(self, job: str) -> None:
        """Have the job end: its nodes get SIGTERM, and time for a checkpoint."""


def job_name(request: Request) -> str:
    """Return the name of the job. Kubernetes allows 63 characters, with what JobSet appends."""
    return f"dlac-{re.sub('[^a-z0-9]+', '-', request.spec.run.lower())}"[:30].rstrip("-")


def leave_s(request: Request) -> int:
    """Return the whole seconds from SIGTERM until a node is gone."""
    return math.ceil(request.spec.launch.leave_s) + _MARGIN_S


def launcher_for(request: Request, on_event: Callable[[Event], None], starter: RankStarter | None = None) -> Launcher:
    """Return the launcher that the job spec names in `launch.on`. `starter`, if set, imports for the ranks already.

    Raise `SpecInvalid` if the scheduler cannot do what the job spec requests, `BadInput` without the client of Kubernetes.
    """
    if request.spec.launch.on == "here":
        return Supervisor(request, on_event=on_event, starter=starter)
    if request.spec.launch.on == "kubernetes" and find_spec("kubernetes") is None:
        raise BadInput('expected the client of Kubernetes, found none: pip install "dlac-pipeline[cluster]"')
    return _cluster_job(request, on_event)


def render_job(request: Request) -> str:
    """Return the job that a scheduler would get, with *** for each secret. Raise `SpecInvalid` if none can run it."""
    if request.spec.launch.on == "here":
        raise SpecInvalid("expected launch.on = 'slurm' or 'kubernetes' to render a job for, found 'here'")
    shown = parse_spec(mask_setting("", request.spec.model_dump()), origin="the job spec without its secrets")
    return _cluster_job(request.model_copy(update={"spec": shown}), lambda event: None).render()


def _cluster_job(request: Request, on_event: Callable[[Event], None]) -> "ClusterJob":
    from dlac_pipeline.extensions.clusters.cluster_job import ClusterJob
    from dlac_pipeline.extensions.clusters.kubernetes import Kubernetes
    from dlac_pipeline.extensions.clusters.slurm import Slurm

    check_cluster(request.spec)
    return ClusterJob(request, Slurm() if request.spec.launch.on == "slurm" else Kubernetes(request), on_event)


def check_cluster(spec: JobSpec) -> None:
    """Raise `SpecInvalid` for a setting, or a lakehouse, with which the scheduler of `launch.on` cannot run a job."""
    lakehouse = configured(spec.lakehouse)
    if lakehouse.uri.startswith("sqlite"):
        raise SpecInvalid(
            f"expected lakehouse.uri that the nodes of the job reach, found {lakehouse.address!r}, which serves one host: "
            "name a PostgreSQL or a REST catalog"
        )
    if spec.launch.on == "slurm":
        _refuse(spec.cluster, _OF_KUBERNETES, "slurm")
        _check_options(spec.cluster)
        return
    _refuse(spec.cluster, _OF_SLURM, "kubernetes")
    if not spec.cluster.image:
        raise SpecInvalid("expected cluster.image, the image of the nodes, found none: name one with DLAC in it")
    _check_pod(spec.cluster)
    _check_mounted(spec)


def store_in_doubt(spec: JobSpec) -> str | None:
    """Return a warning about a store that no setting names: whether all nodes of Slurm reach it, only the cluster knows."""
    store = str((home_folder() / "checkpoints").resolve())
    if spec.launch.on != "slurm" or spec.checkpoint.store not in ("", store):
        return None
    return f"expected checkpoint.store, which all nodes reach, found none: checkpoints go to {store!r} of each node"


def _check_options(cluster: ClusterSpec) -> None:
    options = {f"options.{name}": value for name, value in cluster.options.items()}
    for name, value in {**options, "partition": cluster.partition, "account": cluster.account}.items():
        if re.search(_CUT_BY_SBATCH, value):
            raise SpecInvalid(
                f"expected cluster.{name} without blanks, quotes, backslashes and '#', at which sbatch cuts a script's "
                f"options, found {value!r}: write it without them"
            )
    if taken := sorted(_OURS & set(cluster.options)):
        raise SpecInvalid(
            f"expected no option in cluster.options that another setting defines, found {taken[0]!r}: leave it out"
        )


def _check_mounted(spec: JobSpec) -> None:
    """Refuse folders of a pod's own, which end with it: the next pod would find neither checkpoints nor tables."""
    mounts = [Path(mount.path) for mount in spec.cluster.mounts if mount.writable]
    for container in _containers(spec.cluster):
        added = container.get("volumeMounts", []) if container["name"] == NODE else []
        mounts += [Path(mount["mountPath"]) for mount in added if not mount.get("readOnly")]
    places = {"checkpoint.store": spec.checkpoint.store, "lakehouse.warehouse": spec.lakehouse.warehouse}
    for name, place in places.items():
        folder = place.removeprefix("file://").removeprefix("file:")
        if folder.startswith("/") and not any(Path(folder).is_relative_to(mount) for mount in mounts):
            raise SpecInvalid(
                f"expected {name} that all pods reach, found {place!r}, in no folder that they mount to write: name a bucket, or "
                "a folder in one of cluster.mounts"
            )


def _check_pod(cluster: ClusterSpec) -> None:
    """Refuse fields without an effect, and fields that other settings define."""
    found = [f"cluster.pod.{name}" for name in cluster.pod if name not in ("metadata", "spec")]
    found += [f"cluster.pod.spec.{name}" for name in cluster.pod.get("spec", {}) if name in _OUR_POD]
    for container in _containers(cluster):
        ours = _OUR_CONTAINER if container["name"] == NODE else ()
        found += [f"cluster.pod.spec.containers.{name}" for name in container if name in ours]
    if found:
        raise SpecInvalid(
            f"expected no {found[0]}, which Kubernetes ignores there or DLAC sets itself (launch.deadline_s, "
            "cluster.time_limit_s, retries, image, python, env): leave it out"
        )


def _containers(cluster: ClusterSpec) -> list[dict[str, Any]]:
    containers = cluster.pod.get("spec", {}).get("containers", [])
    if not all(isinstance(one, dict) and one.get("name") for one in containers):
        raise SpecInvalid(
            f"expected a name for each of cluster.pod.spec.containers ({NODE!r}: the node's own), found {containers!r}"
        )
    return list(containers)


def _refuse(cluster: ClusterSpec, names: tuple[str, ...], on: str) -> None:
    for name in names:
        if value := getattr(cluster, name):
            raise SpecInvalid(f"expected no cluster.{name} with launch.on = {on!r}, found {value!r}: leave it out")
