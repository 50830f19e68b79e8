"""The launch section of a job spec: how the ranks are started, watched and recovered."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from dlac_pipeline.spec.spec_problems import LONGEST_WAIT_S, MOST_NODES, Section

NODES = "nodes"
"""Reason of an attempt that exits to make room for more nodes. It has no deadline, so this is no notice."""
LISTENS_S = 30.0
"""Extra seconds for the nodes of a cluster's job, past their ranks' time to exit, until their last events appear in its logs."""


def check_port(address: str) -> None:
    """Check the port of a host:port. An empty address has none.

    Raises:
        ValueError: it is no port.
    """
    host, _, port = address.rpartition(":")
    if address and not (host and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"expected host:port with a port from 1 to 65535, found {address!r}: correct it")


class LaunchSpec(Section):
    """Start and supervision of the ranks."""

    script: str = Field(
        description="The training script, run by every rank; relative to the spec's file. From Dagster, relative to the "
        "folder in which Dagster was started: better absolute."
    )
    args: list[str] = Field(default_factory=list, description="Arguments of the script.")
    world_size: int = Field(
        default=1,
        description="Number of ranks; divides the batch size. With `nodes` it is chosen, whatever stands here.",
        ge=1,
        le=MOST_NODES,
    )
    on: Literal["here", "slurm", "kubernetes"] = Field(
        default="here",
        description='"here": on this node, or on the nodes where the same command is started. "slurm", "kubernetes": as a job of '
        "that scheduler, in which every node is supervised; see the cluster section.",
    )
    nodes: str = Field(
        default="",
        description='Nodes that train the run together: "4", or "2:4" for at least 2 and at most 4. Each starts the same '
        "command. The world size is the largest that divides the batch size. Empty: this node, `world_size` ranks.",
        pattern=r"^([1-9][0-9]*(:[1-9][0-9]*)?)?$",
    )
    nproc_per_node: int = Field(
        default=0,
        description="With `nodes`: ranks that this node can take. 0: as many as it has accelerators, one without any.",
        ge=0,
        le=4096,
    )
    rendezvous: str = Field(
        default="",
        description="With several nodes: host:port at which they meet. The node with that address serves it. The nodes of a "
        "scheduler's job find it automatically.",
        pattern=r"^(\S+:[0-9]+)?$",
    )
    rendezvous_key_file: str = Field(
        default="",
        description="With several nodes: a file with the secret that all of them share, at least 16 characters; empty: the "
        "environment variable DLAC_RENDEZVOUS_KEY. A node without it can neither join, read nor stop the run.",
    )
    gather_timeout_s: float = Field(
        default=600.0,
        description="Seconds until the least number of nodes must have joined, at the start and after a failure.",
        gt=0,
        le=LONGEST_WAIT_S,
    )
    last_call_s: int = Field(
        default=5,
        description="Seconds to wait for more nodes once the least number exists.",
        ge=1,
        le=LONGEST_WAIT_S,
    )
    node_timeout_s: int = Field(
        default=10,
        description="Seconds without a heartbeat of a node after which it is lost.",
        ge=3,
        le=LONGEST_WAIT_S,
    )
    verify_together_mb: int = Field(
        default=1024,
        description="With several nodes: a checkpoint at least so large (MiB), in a folder that they share, is verified by all "
        "of them, each its part, before it is resumed from; a smaller one by the node that leads.",
        ge=0,
        le=2**30,
    )
    start: Literal["fork", "spawn"] = Field(
        default="fork",
        description='"fork": ranks are forked from a process that has imported their libraries, so that a relaunch does not '
        'import them; "spawn": each rank is a new Python.',
    )
    preload: list[str] = Field(
        default_factory=list,
        description='With start = "fork": modules that it imports in addition to PyTorch and DLAC, such as "deepspeed". '
        "Modules that begin threads or open an accelerator at import are refused.",
    )
    max_restarts: int | None = Field(
        default=None,
        description="Restarts after failures before the run stops, as torchrun's option; unset: any number with progress.",
        ge=0,
        le=1_000_000,
    )
    numa_binding: Literal["", "node", "socket", "exclusive", "core-complex"] = Field(
        default="",
        description="Binding of ranks to the cores beside their accelerator, as torchrun's option; empty: none.",
    )
    virtual_local_rank: bool = Field(
        default=False, description="Each rank sees its accelerator alone, as device 0, as torchrun's option."
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables set for the ranks; also for imports before them. OMP_NUM_THREADS is 1 "
        "unless it is set here or where the run is launched.",
    )
    grace_s: float = Field(
        default=20.0,
        description="Seconds that ranks get to checkpoint and leave when asked to stop.",
        gt=0,
        le=25,  # a supervisor whose orchestrator died is gone within 30 s
    )
    deadline_s: float = Field(
        default=0.0,
        description="Seconds from a notice (SIGTERM, SIGUSR1, termination_url) until the ranks have exited, after an emergency "
        "checkpoint if there is time for one; 0: grace_s.",
        ge=0,
        le=LONGEST_WAIT_S,
    )
    termination_url: str = Field(
        default="",
        description="URL asked every few seconds for a termination of this node: 200 is a notice, 404 is none.",
        pattern=r"^(https?://.+)?$",
    )
    termination_headers: dict[str, str] = Field(default_factory=dict, description="Headers of those requests: a token.")
    termination_match: str = Field(
        default="", description="Text that a notice has in it, where the URL always answers 200; empty: any 200 is one."
    )
    log_mb: int = Field(
        default=8,
        description="Largest size of the log of a rank in one attempt (MiB): of a longer one the first quarter and at least the "
        "last quarter stay; 0: no bound.",
        ge=0,
        le=1_000_000,
    )
    hang_timeout_s: float = Field(
        default=600.0,
        description="Seconds without progress of a rank after which the attempt is ended and relaunched.",
        gt=0,
        le=LONGEST_WAIT_S,
    )
    start_timeout_s: float = Field(
        default=600.0,
        description="As hang_timeout_s, while a rank starts or loads its state (or is still waited for by others that do not); "
        "the longer of the two counts.",
        gt=0,
        le=LONGEST_WAIT_S,
    )
    new_leg: bool = Field(
        default=False,
        description="Whether resuming may begin a new leg where this spec changes weights, exclusions, batch size, passes, "
        "steps, snapshot, seed, shuffle or block_slices; false: such a change is refused.",
    )
    attempts_without_progress: int = Field(
        default=3,
        description="Attempts in a row that commit nothing before the run stops with NoProgress.",
        ge=1,
        le=1_000_000,
    )
    deaths_at_same_rows: int = Field(
        default=3,
        description="Attempts in a row that die in the same step, with its batch in hand, before the rows of that batch are "
        "quarantined and the run continues without them. 0: never.",
        ge=0,
        le=1_000_000,
    )
    on_nonfinite_loss: Literal["stop", "warn"] = Field(
        default="stop",
        description='"stop": the run ends with LossNotFinite soon after the first step whose loss is NaN or infinite, and before '
        'a checkpoint of that step or of such weights; "warn": it trains on, and reports it. A step that was not applied, such '
        "as one of an fp16 overflow, does not count.",
    )
    straggler_factor: float = Field(
        default=2.0,
        description="A rank is a straggler when its own time in a phase is this many times the median of the other ranks'. "
        "0: never.",
        ge=0,
        le=1e6,
    )
    straggler_s: float = Field(
        default=1.0,
        description="And when it is slower than that median by at least so many seconds (per step).",
        ge=0,
        le=LONGEST_WAIT_S,
    )
    straggler_steps: int = Field(
        default=5, description="Steps in a row over which reading and computing are compared.", ge=1, le=1_000_000
    )

    @field_validator("env", "termination_headers")
    @classmethod
    def _can_be_variables(cls, named: dict[str, str]) -> dict[str, str]:
        for name, value in named.items():
            if not name or set(name) & set("=\0\r\n ") or "\0" in value:
                raise ValueError(
                    f"expected names without '=', spaces and NUL, and values without NUL, found the name {name!r}: correct it"
                )
        return named

    @field_validator("preload")
    @classmethod
    def _can_be_modules(cls, modules: list[str]) -> list[str]:
        for module in modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"expected names of modules, as in an import, found {module!r}: correct it")
        return modules

    @field_validator("script", "args")
    @classmethod
    def _can_be_arguments(cls, value: str | list[str]) -> str | list[str]:
        if any("\0" in each for each in ([value] if isinstance(value, str) else value)):
            raise ValueError(f"expected text without NUL, found {value!r}: remove it")
        return value

    @field_validator("rendezvous")
    @classmethod
    def _is_a_port(cls, rendezvous: str) -> str:
        check_port(rendezvous)
        return rendezvous

    @field_validator("termination_url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            if url and (parts.port == 0 or not parts.hostname):
                raise ValueError("no host, or port 0")
        except ValueError as err:
            raise ValueError(
                f"expected http(s)://host, with a port from 1 to 65535 if any, found {url!r} ({err})"
            ) from err
        return url

    @model_validator(mode="after")
    def _nodes_meet(self) -> LaunchSpec:
        if self.max_nodes > MOST_NODES:
            raise ValueError(f"expected launch.nodes of at most {MOST_NODES}, found {self.nodes!r}")
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"expected nodes as least:most, found {self.nodes!r}: the least number is greater")
        if self.max_nodes > 1 and not self.rendezvous and self.on == "here":
            raise ValueError(
                f"expected launch.rendezvous = host:port, at which {self.nodes} nodes meet, found none: name one of them, with "
                "a free port"
            )
        return self

    @property
    def min_nodes(self) -> int:
        """The least number of machines."""
        return int(self.nodes.partition(":")[0] or 1)

    @property
    def max_nodes(self) -> int:
        """The greatest number of machines."""
        return int(self.nodes.rpartition(":")[2] or 1)

    @property
    def leave_s(self) -> float:
        """Seconds from a notice until the ranks are gone."""
        return self.deadline_s or self.grace_s
