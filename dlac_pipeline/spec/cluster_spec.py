"""Cluster section of a job spec: the nodes on which a run trains, for the scheduler."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from dlac_pipeline.spec.spec_problems import Section

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class MountSpec(Section):
    """A volume from outside a node's container."""

    kind: Literal["claim", "host", "secret"] = Field(
        default="claim",
        description='"claim": a persistent volume claim. "host": a folder of the node. "secret": a secret, with a file for each '
        "key that only the owner can read (mode 0400).",
    )
    source: str = Field(description="Name of the claim or of the secret, or path on the node.", min_length=1)
    path: str = Field(description="Path of the mount in the pod.", pattern=r"^/")
    read_only: bool = Field(default=False, description="Refuse writes by nodes. A secret is always read-only.")

    @property
    def writable(self) -> bool:
        """True if nodes may write to it."""
        return not self.read_only and self.kind != "secret"

    def volume(self) -> dict[str, Any]:
        """Return the volume as Kubernetes writes it."""
        if self.kind == "secret":
            return {"secret": {"secretName": self.source, "defaultMode": 0o400}}
        if self.kind == "host":
            return {"hostPath": {"path": self.source}}
        return {"persistentVolumeClaim": {"claimName": self.source}}


class ClusterSpec(Section):
    """Settings of a scheduler as `launch.on`. launch.nodes has the number of nodes."""

    image: str = Field(
        default="",
        description="Container image with DLAC, the script, and its data paths. Empty on Slurm: the login node's Python.",
    )
    python: str = Field(default="python3", description="Python command of the nodes.", min_length=1)
    cpu: int = Field(default=1, description="Processors of a node.", ge=1, le=65_536)
    gpu: int = Field(
        default=0,
        description="Accelerators of a node. With launch.nodes this is also the number of its ranks, unless "
        "launch.nproc_per_node is set. Without launch.nodes, launch.world_size counts.",
        ge=0,
        le=4096,
    )
    memory_mb: int = Field(
        default=0, description="Memory of a node in megabytes. 0: the scheduler's default.", ge=0, le=2**30
    )
    time_limit_s: int = Field(
        default=0, description="Seconds until the scheduler ends the job. 0: its own limit.", ge=0, le=31_536_000
    )
    port: int = Field(
        default=29400, description="Port at which the first node serves the rendezvous.", ge=1024, le=65535
    )
    retries: int = Field(
        default=0,
        description="Restarts of a failed job. On Slurm all nodes restart together, and preemptions count. On Kubernetes each "
        "pod restarts alone. Preempted jobs and pods are always restarted.",
        ge=0,
        le=1000,
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the nodes. launch.env has those of the ranks."
    )
    partition: str = Field(default="", description="Slurm: partition.")
    account: str = Field(default="", description="Slurm: account to charge.")
    options: dict[str, str] = Field(
        default_factory=dict,
        description='Slurm: further options of sbatch by their long names, e.g. {constraint = "h100"}. An option without a value '
        'has an empty one, e.g. {exclusive = ""}.',
    )
    kind: Literal["jobset", "trainjob"] = Field(
        default="jobset",
        description='Kubernetes: "jobset": a JobSet. "trainjob": a TrainJob of Kubeflow Trainer with the same pods.',
    )
    queue: str = Field(default="", description="Kubernetes: local queue of Kueue.")
    namespace: str = Field(default="", description="Kubernetes: namespace. Empty: default.")
    service_account: str = Field(default="", description="Kubernetes: service account of the pods.")
    priority_class: str = Field(default="", description="Kubernetes: priority class of the job.")
    mounts: list[MountSpec] = Field(default_factory=list, description="Kubernetes: volumes that pods mount.")
    pod: dict[str, Any] = Field(
        default_factory=dict,
        description="Kubernetes: settings that are merged into each pod, in the words of Kubernetes (spec.nodeSelector, "
        'spec.tolerations ...). A container named "node" is merged into the container of the node.',
    )

    @field_validator("env", "options")
    @classmethod
    def _named(cls, settings: dict[str, str]) -> dict[str, str]:
        wrong = [name for name in settings if not _PLAIN.fullmatch(name)]
        if wrong:
            raise ValueError(f"expected plain names, found {wrong[0]!r}: letters, digits, '_' and '-' only")
        if any("\0" in value for value in settings.values()):
            raise ValueError("expected values without NUL, found one: remove it")
        return settings
