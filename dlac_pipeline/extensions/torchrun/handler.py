"""DLAC's rounds as a rendezvous backend of torchrun: `torchrun --rdzv-backend dlac ...`. See docs/launchers.md.

torchrun's agent asks several times a second for another round. There should be one when a node was lost or its ranks failed, when
a node came that makes more ranks, and when the leader was lost. The first rank claims the run (`training_run("job.toml")`).
"""

import threading
from collections.abc import Callable

from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic import rendezvous

from dlac_pipeline.elastic.membership import EndedElsewhere, Membership
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.errors import NodesMissing
from dlac_pipeline.spec.launch_spec import LaunchSpec

BACKEND = "dlac"
_ANOTHER_ROUND = "another-round"
_ENDED = {"ending": "closed"}


class DlacRendezvous(rendezvous.RendezvousHandler):
    """The rendezvous of one agent."""

    def __init__(self, run_id: str, launch: LaunchSpec, *, batch_size: int) -> None:
        """`launch` has the limits of nodes and times. The world size divides `batch_size`, unless that is 0."""
        self._run_id = run_id
        self._membership = Membership(run_id, launch, batch_size=batch_size, config="")
        self._round: Round | None = None
        self._closed = False
        self._attempt = 0

    def get_backend(self) -> str:
        """Return the name that `--rdzv-backend` has."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the name that `--rdzv-id` has."""
        return self._run_id

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Wait for the next round, and return this node's place in it.

        Raise `RendezvousClosedError` if the run has ended without this node, `RendezvousTimeoutError` if too few nodes came, and
        `SpecInvalid` for nodes of another number of ranks, or no secret that they share.
        """
        if self._round is not None:
            self._round.close()
            if self._round.cut_off:
                self._membership.forget()
        try:
            round_ = self._membership.next_round(self._attempt, threading.Event(), lambda: None)
        except EndedElsewhere as err:
            self._closed = True
            raise rendezvous.RendezvousClosedError("the run has ended on the other nodes") from err
        except NodesMissing as err:
            raise rendezvous.RendezvousTimeoutError(str(err)) from err
        assert round_ is not None, "nothing stops it"
        self._round, self._attempt = round_, self._attempt + 1
        share = round_.share
        try:
            store = self._membership.open_store() or HashStore()
        except (OSError, RuntimeError) as err:
            raise rendezvous.RendezvousConnectionError(str(err)) from err
        return rendezvous.RendezvousInfo(
            PrefixStore(f"dlac/{self._run_id}/agents/round-{round_.number}", store),
            share.node,
            share.nodes,
            rendezvous.RendezvousStoreInfo(share.address, share.port),
        )

    def num_nodes_waiting(self) -> int:
        """Return 1 if this round should end and another one begin, else 0."""
        round_ = self._round
        if round_ is None:
            return 0
        if round_.leads and (round_.lost_nodes() or round_.could_grow):
            round_.announce(_ANOTHER_ROUND, {})
        return int(bool(round_.cut_off or round_.lost_nodes() or round_.announced(_ANOTHER_ROUND) is not None))

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        return self._closed

    def set_closed(self) -> None:
        """Announce that the run has ended."""
        self._closed = True
        self._membership.end_run(_ENDED)

    def shutdown(self) -> bool:
        """Leave the run. The leader announces that the run has ended."""
        if self._round is not None and self._round.leads:
            self.set_closed()
        self._membership.close()
        return True


def create_handler(parameters: rendezvous.RendezvousParameters) -> DlacRendezvous:
    """Return the handler of an agent, from torchrun's arguments.

    `--rdzv-conf` takes `timeout` (seconds to wait for the least number of nodes, torchrun gives 900), `last_call_timeout`,
    `node_timeout`, `key_file` and `batch_size`.
    """
    several = parameters.max_nodes > 1
    launch = LaunchSpec(
        script="torchrun",
        nodes=f"{parameters.min_nodes}:{parameters.max_nodes}" if several else "",
        nproc_per_node=1,  # the agent counts its own ranks
        rendezvous=parameters.endpoint if several else "",
        rendezvous_key_file=str(parameters.get("key_file", "")),
        gather_timeout_s=float(parameters.get("timeout", 900)),
        last_call_s=parameters.get_as_int("last_call_timeout", 5) or 5,
        node_timeout_s=parameters.get_as_int("node_timeout", 10) or 10,
    )
    batch_size = parameters.get_as_int("batch_size", 0) or 0  # every number of ranks divides 0
    return DlacRendezvous(parameters.run_id, launch, batch_size=batch_size)


def torchrun_handler() -> Callable[[rendezvous.RendezvousParameters], rendezvous.RendezvousHandler]:
    """Return a function that makes handlers, as the entry point group `torchrun.handlers` wants."""
    return create_handler
