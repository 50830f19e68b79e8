"""Connections between replica groups on one node: the process group of those present, and the state for a newcomer.

Gloo closes the connections of a group once none of its reductions is under way, and waits for that. A step must not wait for it,
so they are closed in threads of their own.
"""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torchft import ProcessGroupGloo
from torchft.checkpointing import HTTPTransport

from dlac_pipeline.elastic.ranks.addresses import LOOPBACK

_OWN_CLIENTS = (LOOPBACK, f"::ffff:{LOOPBACK}")
_NO_PROXY = "no_proxy"


class Peers(ProcessGroupGloo):  # type: ignore[misc]  # published without types
    """Process group of the groups present. Each quorum with other members configures it again."""

    _pg: Any
    meeting: str = ""
    """Address of the stores of the last quorum, which no other quorum has."""
    collective_timeout: timedelta
    """Time limit of a collective. That of connecting is the group's own: a peer may die before it connects."""

    def configure(self, store_addr: str, *arguments: Any, **options: Any) -> None:
        """Connect the groups of a quorum."""
        super().configure(store_addr, *arguments, **options)
        self.meeting = store_addr

    def abort(self, errored: bool = True) -> None:
        """Close the connections in the background."""
        self.drop(())

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        group = super()._create_pg(store, rank, world_size)
        group._get_backend(torch.device("cpu"))._set_default_timeout(self.collective_timeout)
        return group

    def drop(self, works: Sequence[Any]) -> None:
        """Close the connections in the background after failed collectives. Peers that wait for this group fail at once.

        The connections close once nothing refers to them. torchft's `works` are in reference cycles, and refer to Gloo's.
        """
        connected = [self._pg, *(vars(work).pop("_work", None) for work in works)]
        self._pg = None
        threading.Thread(target=connected.clear, name="closing", daemon=True).start()


class StateServer(HTTPTransport[dict[str, Any]]):  # type: ignore[misc]  # published without types
    """Server of this group's state, for newcomers on this node: torchft's, at loopback instead of the name of the node.

    The name may have no address, as in a container. Processes of other nodes get no answer.
    """

    def __init__(self, limit: timedelta) -> None:
        super().__init__(limit, num_chunks=0)
        self._server.verify_request = lambda request, client: client[0] in _OWN_CLIENTS
        os.environ[_NO_PROXY] = ",".join(filter(None, [os.environ.get(_NO_PROXY), LOOPBACK]))

    def address(self) -> str:
        """Return the address of the states, without the step."""
        return f"http://{LOOPBACK}:{self._server.socket.getsockname()[1]}/checkpoint/"
