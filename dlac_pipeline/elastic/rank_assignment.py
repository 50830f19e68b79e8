"""Assignment of ranks to nodes: the largest world size that divides the global batch, so that batches stay what they are.

In: what the nodes offer. Out: the members of a round, the leader first, and how many ranks each has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dlac_pipeline.ranks.share import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a node brings."""

    host: str
    address: str
    """Address at which the other nodes reach it."""
    ranks: int
    """Number of ranks that it can have."""
    interface: str = ""
    """Network interface of its ranks; empty: the libraries choose one."""
    attempt: int = 0
    """Last attempt of the run that it has taken part in."""
    config: str = ""
    """Digest of what it would train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A node of a round."""

    slot: int
    id: str
    """Random name of the node's connection: a plan of an earlier time, which a stranger wrote again, has another one."""
    offer: Offer
    first_rank: int
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """Members of one round, the leader first, and the port of the process group's store at the leader."""

    number: int
    port: int
    members: tuple[Member, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(member.ranks for member in self.members)

    def place_of(self, slot: int, id_: str) -> int | None:
        """Return the place of a node by its slot and its id; None: it is no member."""
        found = ((member.slot, member.id) for member in self.members)
        return next((place for place, each in enumerate(found) if each == (slot, id_)), None)

    def share(self, place: int) -> Share:
        """Return the ranks of the node at a place."""
        member = self.members[place]
        return Share(
            world_size=self.world_size,
            ranks=member.ranks,
            first_rank=member.first_rank,
            node=place,
            address=self.members[0].offer.address,
            port=self.port,
            interface=member.offer.interface,
        )

    def message(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> RoundPlan:
        """Return the plan that `message()` made."""
        members = tuple(Member(**{**member, "offer": Offer(**member["offer"])}) for member in message["members"])
        return cls(number=message["number"], port=message["port"], members=members)


def usable_ranks(batch_size: int, available: int) -> int:
    """Return the largest number of ranks, at most `available`, that divides the batch size."""
    return max(ranks for ranks in range(1, available + 1) if batch_size % ranks == 0)


def assign_ranks(
    offers: Mapping[int, Offer],
    ids: Mapping[int, str],
    *,
    leader: int,
    stay: Collection[int],
    batch_size: int,
    most_nodes: int,
) -> tuple[Member, ...]:
    """Return the members of a round by what the nodes in each slot offer, and by their ids; a node without a rank is none.

    The leader is first. Nodes of the last round (`stay`) come before others, and of these the ones with the most ranks.
    """
    order = sorted(offers, key=lambda slot: (slot != leader, slot not in stay, -offers[slot].ranks, slot))[:most_nodes]
    left = usable_ranks(batch_size, sum(offers[slot].ranks for slot in order))
    members: list[Member] = []
    first = 0
    for slot in order:
        ranks = min(offers[slot].ranks, left)
        if ranks:
            members.append(Member(slot=slot, id=ids[slot], offer=offers[slot], first_rank=first, ranks=ranks))
        first, left = first + ranks, left - ranks
    return tuple(members)


def refuse_other_jobs(
    offers: Mapping[int, Offer], ids: Mapping[int, str], mine: int, *, stay: Collection[int]
) -> dict[str, Any]:
    """Return the ids of nodes that would train another job, and why they are refused; empty: all would train the same.

    Before the first round all are refused, for it is not known whose job is meant.
    """
    other = [slot for slot, offer in offers.items() if offer.config != offers[mine].config]
    if not other:
        return {}
    hosts = ", ".join(offers[slot].host for slot in other)
    refused = other if stay else offers
    return {"ids": [ids[slot] for slot in refused], "why": f"found another one on {hosts} than on {offers[mine].host}"}
