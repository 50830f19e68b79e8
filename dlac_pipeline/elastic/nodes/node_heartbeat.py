"""Heartbeat of a node: its connection, slot, election and round together, and the order of an exchange with the store."""

from collections.abc import Collection

from dlac_pipeline.elastic.nodes.connection import StoreConnection
from dlac_pipeline.elastic.nodes.election import Election
from dlac_pipeline.elastic.nodes.leadership import Leadership
from dlac_pipeline.elastic.nodes.round_state import RoundState
from dlac_pipeline.elastic.nodes.slots import NodeSlots
from dlac_pipeline.elastic.rank_assignment import Offer, RoundPlan
from dlac_pipeline.elastic.sealed_store import Message, SealedStore
from dlac_pipeline.spec.launch_spec import LaunchSpec

_REPEAT = 16
"""Exchanges after which a leader reads silent nodes and repeats its announcements."""


class NodeHeartbeat:
    """Announces one node to the run's store, and elects the leader."""

    def __init__(
        self,
        store: SealedStore,
        launch: LaunchSpec,
        *,
        batch_size: int,
        ended_before: str | None,
        ids_before: Collection[str] = (),
    ) -> None:
        """Begin to talk to the store. `ended_before` as in `Election`, `ids_before`: ids of this node's past connections."""
        self.connection = connection = StoreConnection(store, timeout_s=launch.node_timeout_s)
        self.slots = slots = NodeSlots(connection, ids_before=ids_before)
        self.election = election = Election(connection, slots, ended_before=ended_before)
        self.round = round_ = RoundState(connection, slots, election)
        self.leadership = Leadership(connection, slots, election, round_, launch=launch, batch_size=batch_size)
        self._exchanges = 0
        connection.start(self._exchange, depart=self._depart, pause_s=self._pause_s)

    @property
    def slot(self) -> int:
        """This node's number, or 0 before it has one."""
        return self.slots.own

    @property
    def leads(self) -> bool:
        """True if this node has the lease."""
        return self.election.leads

    @property
    def plan(self) -> RoundPlan | None:
        """The plan of the round that this node is a member of."""
        with self.connection.lock:
            return self.round.plan if self.round.is_member else None

    @property
    def place(self) -> int | None:
        """This node's place in its round. None: it is no member of one."""
        plan = self.plan
        return None if plan is None else plan.place_of(self.slots.own, self.slots.id)

    @property
    def others_train(self) -> bool:
        """True if a live leader has a round without this node."""
        with self.connection.lock:
            return not self.round.is_member and self.election.has_live_round

    @property
    def nodes_known(self) -> int:
        """Number of nodes that wait for a round or took part in the last one, as far as this node knows."""
        with self.connection.lock:
            return max(self.election.nodes_ready, 1 if self.round.plan is None else self.round.plan.nodes)

    def seek(self, offer: Offer) -> None:
        """Wait for the next round from now on."""
        with self.connection.lock:
            self.round.seek(offer)
            self.leadership.begin_last_call()
        self.connection.hurry()

    def publish(self, message: Message, *, hurry: bool = False) -> None:
        """Replace this node's message: to the leader, or, from the leader, to all. Without `hurry` with the next heartbeat."""
        with self.connection.lock:
            self.round.message = message
        if hurry:
            self.connection.hurry()

    def close(self, *, leaves: bool) -> None:
        """Stop. A node that leaves reports it, and a leader returns its lease."""
        self.connection.close(leaves=leaves)

    def _pause_s(self) -> float:
        with self.connection.lock:
            if self.election.leads:
                return self.connection.pause_of_leader_s(len(self.slots.peers))
            trains = self.round.is_member and bool(self.round.announcements)
            return self.connection.pause_s(trains=trains or self.others_train)

    def _exchange(self) -> None:
        """Read the lease, write this node's record, lead if this node has or may take the lease, and read the round."""
        self._exchanges += 1
        lease = self.election.read()
        if not self.slots.own and not self.election.others_meet:
            self.slots.take(self.election.lease["slots"])
        if self.slots.own:
            self.slots.write(self.round.record())
        if not self.slots.own:
            return
        if self.slots.own > self.election.lease["slots"]:
            self.slots.restore_counter()
        if self.election.leads:
            self.leadership.lead(lease, repeats=self._exchanges % _REPEAT == 0)
        elif self.round.waits and self.election.may_lead(lease):
            self.election.begin_leading(lease)
        self.round.read_plan()
        self.round.read_announcements()

    def _depart(self) -> None:
        if self.slots.own:
            self._exchange()
            self.slots.write({"gone": True, "knows_end": None})
            self.election.give_back()
