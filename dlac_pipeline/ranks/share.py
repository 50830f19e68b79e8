"""Which of an attempt's ranks one machine has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The ranks of one machine in one attempt: `ranks` of `world_size`, beginning with `first_rank`."""

    world_size: int
    ranks: int
    first_rank: int = 0
    node: int = 0
    """The machine's place; 0 leads."""
    address: str = "127.0.0.1"
    """The leader's, where ranks meet."""
    port: int = 0
    interface: str = ""
    """This machine's, through which its ranks talk to the others'; empty: whichever the libraries choose."""
