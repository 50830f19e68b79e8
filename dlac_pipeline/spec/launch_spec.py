"""The launch section of a job spec: how ranks are started, watched and recovered."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.spec.bounds import LONGEST_WAIT_S, MOST_NODES
from dlac_pipeline.spec.mesh_spec import MeshSpec
from dlac_pipeline.spec.spec_problems import Section, Timeout, name_in

LAUNCHERS = Door("dlac.launchers", "launcher")
HERE = "here"
"""The launcher of the core: this node."""
NOTICES = ("SIGTERM", "SIGUSR1", "termination_url", "launcher")
"""Reasons to stop a run: a signal, the answer of the URL, or the end of the launcher that started the ranks."""
LISTENS_S = 30.0
"""Extra seconds for the nodes of a cluster's job, past their ranks' time to exit, until their last events appear in its logs."""
LEAST_START_S = 600.0
"""Seconds that a start may take without progress: libraries are imported, and a checkpoint may be converted."""


def check_port(address: str) -> str:
    """Return a host:port, or an empty address. Raise `ValueError` if its port is none."""
    host, _, port = address.rpartition(":")
    if address and not (host and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"expected host:port with a port from 1 to 65535, found {address!r}: correct it")
    return address


def check_rendezvous(addresses: str) -> str:
    """Return addresses with commas between them. Raise `ValueError` as `check_port` for one of them."""
    for each in addresses.split(",") if addresses else ():
        if not each:
            raise ValueError(f"expected host:port between commas, found {addresses!r}: correct it")
        check_port(each)
    return addresses


class LaunchSpec(Section):
    """Start and supervision of the ranks."""

    script: str
    """The training script that each rank runs, relative to the file of the spec."""
    args: list[str] = Field(default_factory=list)
    """Arguments of the script."""
    world_size: int = Field(default=1, ge=1, le=MOST_NODES)
    """Number of ranks. It divides the batch size. With `nodes` DLAC chooses it and ignores this value."""
    replicas: int = Field(default=0, ge=0, le=MOST_NODES)
    """Replica groups, each with the whole model. If one dies, the others train on without it, and its replacement joins them at a
    step. The script restores a `TorchFTState`. Needs torchft. Each of several `nodes` has as many groups. 0: none."""
    ranks_per_replica: int = Field(default=1, ge=1, le=MOST_NODES)
    """Ranks of a replica group. The script shards its model over them with `fully_shard`. If one dies, its whole group is started
    again. Ranks may have one sample more than others, if `replicas` * `ranks_per_replica` does not divide the batch size."""
    mesh: MeshSpec = Field(default_factory=MeshSpec)
    """Parallelism within a replica of the model."""
    on: Annotated[str, name_in(LAUNCHERS, "launch.on", HERE)] = HERE
    """"here": on this node, or on the nodes where the same command is started. "slurm", "kubernetes": as a job of that scheduler,
    with a supervisor on each node. See the cluster section. Other names: launchers that are installed."""
    nodes: str = Field(default="", pattern=r"^([1-9][0-9]*(:[1-9][0-9]*)?)?$")
    """Nodes that train the run together: "4", or "2:4" for at least 2 and at most 4. Each starts the same command. The world size
    is the largest that divides the batch size. Empty: this node, with `world_size` ranks."""
    nproc_per_node: int = Field(default=0, ge=0, le=4096)
    """With `nodes`: ranks of this node. 0: one per accelerator, or one rank without accelerators."""
    rendezvous: Annotated[str, AfterValidator(check_rendezvous)] = Field(default="", pattern=r"^(\S+:[0-9]+)?$")
    """With several nodes: host:port at which they meet, or several, as in "node1:29400,node2:29400": they meet at the first that
    answers. The node with that address serves it. The nodes of a scheduler's job find it automatically."""
    rendezvous_key_file: str = ""
    """With several nodes: a file with the secret that they share, at least 16 characters. Empty: the environment variable
    DLAC_RENDEZVOUS_KEY. A node without the secret can neither join, read nor stop the run."""
    gather_timeout_s: Timeout = 600.0
    """Seconds until the least number of nodes must have joined, at the start and after a failure."""
    last_call_s: int = Field(default=5, ge=1, le=LONGEST_WAIT_S)
    """Seconds to wait for more nodes once the least number has joined."""
    node_timeout_s: int = Field(default=10, ge=3, le=LONGEST_WAIT_S)
    """Seconds without a heartbeat of a node after which it is lost."""
    start: Literal["fork", "spawn"] = "fork"
    """"fork": ranks are forked from a process that has imported their libraries, so that restarts are fast. "spawn": each rank is
    a new Python process."""
    preload: list[str] = Field(default_factory=list)
    """With start = "fork": modules to import in addition to PyTorch and DLAC, such as "deepspeed". Modules that start threads or
    open an accelerator at import are refused."""
    max_restarts: int | None = Field(default=None, ge=0, le=1_000_000)
    """Restarts after failures before the run stops, as torchrun's option. Unset: any number with progress."""
    numa_binding: Literal["", "node", "socket", "exclusive", "core-complex"] = ""
    """Binding of ranks to the cores next to their accelerator, as torchrun's option. Empty: none."""
    virtual_local_rank: bool = False
    """Show each rank only its own accelerator, as device 0, as torchrun's option."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the ranks, and of imports before they start. OMP_NUM_THREADS is 1 unless it is set here or in the
    environment of the launch."""
    deadline_s: Timeout = 20.0
    """Seconds from a stop request or a termination notice (SIGTERM, SIGUSR1, termination_url) until the ranks must have exited,
    after a checkpoint if time allows one. At most 25 if the orchestrator of the launch died."""
    termination_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL to poll every few seconds for a termination of this node. Status 200 is a notice, 404 is none. Answers of Google and
    Azure that announce no termination are none."""
    termination_headers: dict[str, str] = Field(default_factory=dict)
    """Headers of the requests to termination_url, such as a token."""
    hang_timeout_s: Timeout = 600.0
    """Seconds without progress of a rank after which the attempt ends and the ranks restart. Of replica groups only the hung one
    is killed and started again. While any rank starts or loads its state: at least 600."""
    new_leg: bool = False
    """Allow a resumed run to begin a new leg if this spec changes weights, exclusions, batch size, passes, steps, snapshot, seed,
    shuffle or block_slices. False: such a change is refused."""
    attempts_without_progress: int = Field(default=3, ge=1, le=1_000_000)
    """Attempts in a row that commit nothing until the run stops with NoProgress."""
    deaths_at_same_rows: int = Field(default=3, ge=0, le=1_000_000)
    """Attempts in a row that die in the same step, with its batch in hand, until the rows of that batch are quarantined and the
    run continues without them. 0: never."""
    on_nonfinite_loss: Literal["stop", "warn"] = "stop"
    """"stop": the run ends with LossNotFinite soon after a step whose loss is NaN or infinite. It commits no checkpoint of such a
    step or such weights. "warn": it continues with a warning. Steps that were not applied, such as after an fp16 overflow, do
    not count."""
    on_skipped: Literal["count", "replay"] = "count"
    """"count": the audit counts rows of steps that were not applied. "replay": steps after the last pass train their batches
    again."""
    on_spike: Literal["stop", "exclude"] | None = None
    """"stop": the run ends with LossSpiked soon after a step whose loss is far above those before, by the rule of `dlac spike`,
    or NaN. It commits no checkpoint of that step. "exclude": the next attempt leaves out the rows without which the step would be
    no spike. If it is one again, or no few rows are to blame, training continues with a warning. Unset: it continues. Steps that
    were not applied do not count."""

    @field_validator("env", "termination_headers")
    @classmethod
    def _can_be_variables(cls, named: dict[str, str]) -> dict[str, str]:
        for name in named:
            if not name or set(name) & set("=\r\n "):
                raise ValueError(f"expected names without '=' and spaces, found the name {name!r}: correct it")
        return named

    @field_validator("preload")
    @classmethod
    def _can_be_modules(cls, modules: list[str]) -> list[str]:
        for module in modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"expected names of modules, as in an import, found {module!r}: correct it")
        return modules

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
    def _nodes_meet(self) -> "LaunchSpec":
        if self.max_nodes > MOST_NODES:
            raise ValueError(f"expected launch.nodes of at most {MOST_NODES}, found {self.nodes!r}")
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"expected nodes as least:most, found {self.nodes!r}: the least number is greater")
        if self.max_nodes > 1 and not self.rendezvous and self.on == HERE:
            raise ValueError(
                f"expected launch.rendezvous = host:port, at which {self.nodes} nodes meet, found none: name one of them, with "
                "a free port"
            )
        if "," in self.rendezvous and 2 * self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"expected launch.nodes with a least number above half of {self.max_nodes}, found {self.nodes!r}: nodes at two "
                "addresses of launch.rendezvous could train at once; raise it, or name one address"
            )
        return self

    @model_validator(mode="after")
    def _replicas_are_ranks(self) -> "LaunchSpec":
        """Start the ranks of all replica groups."""
        if not self.replicas:
            if self.ranks_per_replica > 1:
                raise ValueError(
                    f"expected launch.replicas with launch.ranks_per_replica = {self.ranks_per_replica}, found none: set "
                    "it to the number of groups"
                )
            return self
        unusable = ("on_spike", "numa_binding", "virtual_local_rank")
        found = [name for name in unusable if getattr(self, name)] + ["on"] * (self.on != HERE)
        found += ["mesh"] * (self.mesh.replica_ranks > 1)
        if found:
            raise ValueError(f"expected launch.replicas without launch.{found[0]}, found both: leave one out")
        ranks = self.replicas * self.ranks_per_replica
        if self.world_size not in (1, ranks):
            raise ValueError(
                f"expected launch.replicas or launch.world_size, found {self.replicas} and {self.world_size}: leave one out"
            )
        object.__setattr__(self, "world_size", ranks)  # the model is frozen for everybody else
        if self.nodes:
            object.__setattr__(self, "nproc_per_node", self._ranks_of_groups())
        return self

    def _ranks_of_groups(self) -> int:
        """Return the ranks of the replica groups on each of several nodes. Raise `ValueError` if a group would span two."""
        groups, rest = divmod(self.replicas, self.max_nodes)
        ranks = groups * self.ranks_per_replica
        if rest or self.min_nodes < self.max_nodes or self.nproc_per_node not in (0, ranks):
            raise ValueError(
                f"expected one launch.nodes that divides launch.replicas = {self.replicas} and no launch.nproc_per_node, "
                f"found {self.nodes!r} and {self.nproc_per_node}: give each node as many groups of {self.ranks_per_replica} ranks"
            )
        return ranks

    @property
    def healing(self) -> str:
        """Name of the entry of `dlac.healing` that starts the ranks and heals them. Empty: a dead rank ends the attempt."""
        return "replicas" if self.replicas else ""

    @property
    def min_nodes(self) -> int:
        """The least number of nodes."""
        return int(self.nodes.partition(":")[0] or 1)

    @property
    def max_nodes(self) -> int:
        """The greatest number of nodes."""
        return int(self.nodes.rpartition(":")[2] or 1)

    @property
    def start_timeout_s(self) -> float:
        """Seconds without progress of a rank after which the attempt ends, while any rank starts or loads its state."""
        return max(self.hang_timeout_s, LEAST_START_S)

    @property
    def orphaned_s(self) -> float:
        """Seconds from the death of the orchestrator until the ranks must have exited. Their supervisor is gone within 30 s."""
        return min(self.deadline_s, 25.0)
