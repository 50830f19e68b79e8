"""The cluster section of a job spec: the nodes of a scheduler."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from dlac_pipeline.spec.sections import ExtensionSection

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class ClusterSpec(ExtensionSection):
    """Settings of the scheduler that launch.on names. launch.nodes has the number of nodes."""

    image: str = ""
    """Container image with DLAC, the script, and its data paths. Empty on Slurm: the login node's Python."""
    python: str = Field(default="python3", min_length=1)
    """Python command of the nodes."""
    cpu: int = Field(default=1, ge=1, le=65_536)
    """Processors of a node."""
    gpu: int = Field(default=0, ge=0, le=4096)
    """Accelerators of a node. With launch.nodes this is also the number of its ranks, unless launch.nproc_per_node is set.
    Without launch.nodes, launch.world_size counts."""
    memory_mb: int = Field(default=0, ge=0, le=2**30)
    """Memory of a node in megabytes. 0: the scheduler's default."""
    time_limit_s: int = Field(default=0, ge=0, le=31_536_000)
    """Seconds until the scheduler ends the job. 0: the scheduler's limit."""
    retries: int = Field(default=0, ge=0, le=1000)
    """Restarts of a failed job. On Slurm all nodes restart together, and preemptions count. On Kubernetes each pod restarts
    alone. Preempted jobs and pods are always restarted."""
    options: dict[str, str] = Field(default_factory=dict)
    """Slurm: further options of sbatch by their long names, e.g. {partition = "h100", account = "lm"}. An option without a value
    has an empty one, e.g. {exclusive = ""}."""
    kind: Literal["jobset", "trainjob"] = "jobset"
    """Kubernetes: "jobset": a JobSet. "trainjob": a TrainJob of Kubeflow Trainer with the same pods."""
    queue: str = ""
    """Kubernetes: local queue of Kueue."""
    namespace: str = ""
    """Kubernetes: namespace. Empty: default."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Kubernetes: settings that are merged into each pod, in the words of Kubernetes (spec.volumes, spec.tolerations ...). A
    container named "node" is merged into the container of the node: its volumeMounts, env ..."""

    @field_validator("options")
    @classmethod
    def _named(cls, settings: dict[str, str]) -> dict[str, str]:
        wrong = [name for name in settings if not _PLAIN.fullmatch(name)]
        if wrong:
            raise ValueError(f"expected plain names, found {wrong[0]!r}: letters, digits, '_' and '-' only")
        return settings
