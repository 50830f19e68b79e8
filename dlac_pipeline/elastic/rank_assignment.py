"""Assignment of ranks to nodes: the largest world size that divides the global batch, so that batches do not change."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.spec.mesh_spec import DATA_PARALLEL, MeshSpec

_BUSY_MARGIN_S = 10.0
"""Extra seconds for nodes, past the time in which ranks exit, until a round is formed without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The ranks of one node in one attempt: `ranks` of `world_size`, beginning with `first_rank`."""

    world_size: int
    ranks: int
    first_rank: int = 0
    node: int = 0
    """The node's place. 0 leads."""
    nodes: int = 1
    address: str = "127.0.0.1"
    """Address of the leader, where ranks meet."""
    own_address: str = "127.0.0.1"
    """Address of this node."""
    port: int = 0
    interface: str = ""
    """Network interface of this node's ranks. Empty: the libraries choose one."""
    is_late: bool = False
    """True if the node has taken the place of a lost one, in an attempt that trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Offer of a node to a round."""

    host: str
    address: str
    """Address at which all further nodes reach it."""
    ranks: int
    """Number of ranks that it can have."""
    interface: str = ""
    """Network interface of its ranks. Empty: the libraries choose one."""
    attempt: int = 0
    """Last attempt of the run that it has taken part in."""
    config: str = ""
    """Digest of the job that it would train."""
    memory_port: int = 0
    """Port at which it serves states in memory, or 0 if it keeps none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A node of a round."""

    slot: int
    id: str
    """Random name of the node's connection: a plan of an earlier time, which a stranger wrote again, has another one."""
    place: int
    """Number of the node in the round. 0 leads."""
    offer: Offer
    first_rank: int
    ranks: int
    buddy: int = 0
    """Place of the node that has copies of its states in memory: the next one on another host, or else the next one."""
    is_late: bool = False
    """True if it has taken the place of a lost node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """Plan of a round: its size, the port of the process group's store at the leader, and its members, the leader first.

    The leader knows all members. Any other node reads a part, which has the leader, itself, and its buddy.
    """

    number: int
    port: int
    nodes: int
    world_size: int
    members: tuple[Member, ...]

    @classmethod
    def form(cls, members: tuple[Member, ...], *, number: int, port: int) -> "RoundPlan":
        """Return the plan of a round with all its members."""
        ranks = sum(member.ranks for member in members)
        members = tuple(replace(member, buddy=_buddy_of(member, members)) for member in members)
        return cls(number=number, port=port, nodes=len(members), world_size=ranks, members=members)

    @property
    def is_whole(self) -> bool:
        """True if all members are known."""
        return len(self.members) == self.nodes

    def part(self, place: int) -> "RoundPlan":
        """Return the plan with the leader, one member and its buddy, of the same size however many nodes there are."""
        places = sorted({0, place, self.members[place].buddy})
        return replace(self, members=tuple(self.members[each] for each in places))

    def with_member(self, member: Member) -> "RoundPlan":
        """Return the plan with another node at a place."""
        return replace(self, members=tuple(member if member.place == each.place else each for each in self.members))

    def place_of(self, slot: int, id_: str) -> int | None:
        """Return the place of a node by its slot and its id, or None if it is not a known member."""
        return next((member.place for member in self.members if (member.slot, member.id) == (slot, id_)), None)

    def share(self, place: int) -> Share:
        """Return the ranks of the node at a place, which is known."""
        member = next(member for member in self.members if member.place == place)
        return Share(
            world_size=self.world_size,
            ranks=member.ranks,
            first_rank=member.first_rank,
            node=place,
            nodes=self.nodes,
            address=self.members[0].offer.address,
            own_address=member.offer.address,
            port=self.port,
            interface=member.offer.interface,
            is_late=member.is_late,
        )

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "RoundPlan":
        """Return the plan that `asdict` made a message of."""
        members = tuple(Member(**{**member, "offer": Offer(**member["offer"])}) for member in message["members"])
        return cls(**{**message, "members": members})


def _buddy_of(member: Member, members: tuple[Member, ...]) -> int:
    after = [*members[member.place + 1 :], *members[: member.place]]
    apart = [each for each in after if each.offer.host != member.offer.host]
    return (apart or after or [member])[0].place


def usable_ranks(batch_size: int, available: int, mesh: MeshSpec = DATA_PARALLEL) -> int:
    """Return the largest number of ranks, at most `available`, whose readers divide the batch size. 0: too few for a replica."""
    sizes = range(mesh.replica_ranks, available + 1, mesh.replica_ranks)
    return max((each for each in sizes if batch_size % mesh.readers(each) == 0 and mesh.divides(each)), default=0)


def assign_ranks(
    offers: Mapping[int, Offer],
    ids: Mapping[int, str],
    *,
    leader: int,
    stay: Collection[int],
    batch_size: int,
    most_nodes: int,
    mesh: MeshSpec = DATA_PARALLEL,
) -> tuple[Member, ...]:
    """Return the members of a round by the offers of the nodes in each slot. A node without a rank is no member.

    Ranks over which tensors are split are on one node. None is a member if all have too few for a replica of the model.

    The leader is first. Nodes of the last round (`stay`) come before others, and of these the ones with the most ranks.
    """
    order = sorted(offers, key=lambda slot: (slot != leader, slot not in stay, -offers[slot].ranks, slot))[:most_nodes]
    offered = {slot: offers[slot].ranks // mesh.tp * mesh.tp for slot in order}
    remaining = usable_ranks(batch_size, sum(offered.values()), mesh)
    members: list[Member] = []
    first = 0
    for slot in order:
        ranks = min(offered[slot], remaining)
        if ranks:
            place, offer = len(members), offers[slot]
            members.append(Member(slot=slot, id=ids[slot], place=place, offer=offer, first_rank=first, ranks=ranks))
        first, remaining = first + ranks, remaining - ranks
    return tuple(members)


def refuse_other_jobs(
    offers: Mapping[int, Offer], ids: Mapping[int, str], mine: int, *, stay: Collection[int]
) -> dict[str, Any]:
    """Return the ids of nodes that would train another job, if any, and the reason. Before the first round all are refused."""
    other = [slot for slot, offer in offers.items() if offer.config != offers[mine].config]
    if not other:
        return {}
    hosts = ", ".join(offers[slot].host for slot in other)
    refused = other if stay else offers
    return {"ids": [ids[slot] for slot in refused], "why": f"found another one on {hosts} than on {offers[mine].host}"}


class LastCall:
    """Wait of the leader for more nodes once enough exist for a round."""

    def __init__(self, launch: LaunchSpec, now: Callable[[], float]) -> None:
        self._launch = launch
        self._now = now
        self._enough_since: float | None = None

    def is_over(self, ready: int, *, busy: bool) -> bool:
        """Return whether a round of the nodes that are ready is formed. `busy`: a node of the last one still ends its ranks."""
        if ready < self._launch.min_nodes:
            self._enough_since = None
            return False
        self._enough_since = self._now() if self._enough_since is None else self._enough_since
        waited_s = self._now() - self._enough_since
        if busy:  # a node that hangs is not waited for without an end
            return waited_s >= self._launch.deadline_s + _BUSY_MARGIN_S
        return ready >= self._launch.max_nodes or waited_s >= self._launch.last_call_s
