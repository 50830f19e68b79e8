"""Checks of a job spec for a scheduler: settings that it would ignore, cut, or lose with a pod are refused by name."""

import re
from pathlib import Path
from typing import Any

from dlac_pipeline.extensions.clusters.settings import ClusterSpec
from dlac_pipeline.lakehouse.config import home_folder
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.named_catalogs import configured
from dlac_pipeline.spec.job_spec import JobSpec

_OF_SLURM = ("options",)
_OF_KUBERNETES = ("queue", "namespace", "pod")
_OURS = {
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time"),
    *("signal", "no-kill", "requeue", "no-requeue", "job-name", "output", "error", "open-mode"),
}
"""Options of sbatch that the template or another setting gives."""
_CUT_BY_SBATCH = r"[\s#'\"\\]"
_OUR_POD = ("terminationGracePeriodSeconds", "activeDeadlineSeconds", "restartPolicy")
_OUR_CONTAINER = ("command", "args", "image")
NODE = "node"
"""Name of the node's own container in `cluster.pod`."""


def check_lakehouse(spec: JobSpec) -> None:
    """Raise `SpecInvalid` for a lakehouse that serves one host."""
    lakehouse = configured(spec.lakehouse)
    if lakehouse.uri.startswith("sqlite"):
        raise SpecInvalid(
            f"expected lakehouse.uri that the nodes of the job reach, found {lakehouse.address!r}, which serves one host: "
            "name a PostgreSQL or a REST catalog"
        )


def check_slurm(spec: JobSpec) -> None:
    """Raise `SpecInvalid` for a setting that a batch job of Slurm would ignore or cut."""
    _refuse(spec.section(ClusterSpec), _OF_KUBERNETES, "slurm")
    _check_options(spec.section(ClusterSpec))


def check_kubernetes(spec: JobSpec) -> None:
    """Raise `SpecInvalid` for a setting that Kubernetes would ignore, or lose with a pod."""
    _refuse(spec.section(ClusterSpec), _OF_SLURM, "kubernetes")
    if not spec.section(ClusterSpec).image:
        raise SpecInvalid("expected cluster.image, the image of the nodes, found none: name one with DLAC in it")
    _check_pod(spec.section(ClusterSpec))
    _check_mounted(spec)


def store_in_doubt(spec: JobSpec) -> str | None:
    """Return a warning about a store that no setting names: whether all nodes of Slurm reach it, only the cluster knows."""
    store = str((home_folder() / "checkpoints").resolve())
    if spec.launch.on != "slurm" or spec.checkpoint.store not in ("", store):
        return None
    return f"expected checkpoint.store, which all nodes reach, found none: checkpoints go to {store!r} of each node"


def _check_options(cluster: ClusterSpec) -> None:
    for name, value in cluster.options.items():
        if re.search(_CUT_BY_SBATCH, value):
            raise SpecInvalid(
                f"expected cluster.options.{name} without blanks, quotes, backslashes and '#', at which sbatch cuts a script's "
                f"options, found {value!r}: write it without them"
            )
    if taken := sorted(_OURS & set(cluster.options)):
        raise SpecInvalid(
            f"expected no option in cluster.options that another setting defines, found {taken[0]!r}: leave it out"
        )


def _check_mounted(spec: JobSpec) -> None:
    """Refuse folders of a pod's own, which end with it: the next pod would find neither checkpoints nor tables."""
    mounts = [Path(mount["mountPath"]) for mount in writable_mounts(spec.section(ClusterSpec))]
    places = {"checkpoint.store": spec.checkpoint.store, "lakehouse.warehouse": spec.lakehouse.warehouse}
    for name, place in places.items():
        folder = place.removeprefix("file://").removeprefix("file:")
        if folder.startswith("/") and not any(Path(folder).is_relative_to(mount) for mount in mounts):
            raise SpecInvalid(
                f"expected {name} that all pods reach, found {place!r}, in no folder that they mount to write: name a bucket, or "
                "a folder in one of the volumeMounts of the container 'node' in cluster.pod"
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
            "cluster.time_limit_s, retries, image, python): leave it out"
        )


def writable_mounts(cluster: ClusterSpec) -> list[dict[str, Any]]:
    """Return the volume mounts of the node's container that it can write to, as Kubernetes writes them."""
    found = [mount for each in _containers(cluster) if each["name"] == NODE for mount in each.get("volumeMounts", [])]
    return [mount for mount in found if "mountPath" in mount and not mount.get("readOnly")]


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
