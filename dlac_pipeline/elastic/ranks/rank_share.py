"""The share of an attempt's ranks that one node has."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The ranks of one node in one attempt: `ranks` of `world_size`, beginning with `first_rank`."""

    world_size: int
    ranks: int
    first_rank: int = 0
    node: int = 0
    """The node's place. 0 leads."""
    nodes: int = 1
    """Number of nodes in the attempt."""
    address: str = "127.0.0.1"
    """Address of the leader, where ranks meet."""
    port: int = 0
    interface: str = ""
    """Network interface of this node's ranks. Empty: the libraries choose one."""
