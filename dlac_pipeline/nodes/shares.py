"""Which ranks each machine takes: as many in all as are offered and divide the batch size, so that batches stay what they are.

In: what the machines offer. Out: their shares, the leader's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlac_pipeline.ranks.share import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a machine brings."""

    host: str
    address: str
    """At which the others reach it."""
    ranks: int
    """That it can take."""
    interface: str = ""
    """Through which it talks to the others; empty: whichever the libraries choose."""
    attempt: int = 0
    """The last attempt of the run that it has heard of."""
    config: str = ""
    """Digest of what it would train."""


def usable_ranks(batch_size: int, available: int) -> int:
    """The greatest number of ranks, at most `available`, that divides the batch size."""
    return max(ranks for ranks in range(1, available + 1) if batch_size % ranks == 0)


def placed(offers: Sequence[Offer]) -> list[int]:
    """The order of machines, by index into their offers: first who knows of the latest attempt, and leads the next."""
    return sorted(range(len(offers)), key=lambda index: (-offers[index].attempt, index))


def shares(offers: Sequence[Offer], *, batch_size: int, port: int) -> list[Share]:
    """The share of each machine, in the order of `offers`; who comes last may get no rank, and waits until somebody fails."""
    world_size = usable_ranks(batch_size, sum(offer.ranks for offer in offers))
    order = placed(offers)
    found: dict[int, Share] = {}
    first = 0
    for node, index in enumerate(order):
        ranks = min(offers[index].ranks, world_size - first)
        found[index] = Share(
            world_size=world_size,
            ranks=ranks,
            first_rank=first,
            node=node,
            address=offers[order[0]].address,
            port=port,
            interface=offers[index].interface,
        )
        first += ranks
    return [found[index] for index in range(len(offers))]
