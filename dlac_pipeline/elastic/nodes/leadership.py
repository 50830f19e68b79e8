"""Work of the node that leads a run: it forms the rounds, announces, refuses other jobs, and reports the end."""

import secrets
from dataclasses import asdict, replace

from dlac_pipeline.elastic import rank_assignment
from dlac_pipeline.elastic.nodes.connection import StoreConnection
from dlac_pipeline.elastic.nodes.election import Election
from dlac_pipeline.elastic.nodes.round_state import RoundState, name_of_announcement, name_of_plan
from dlac_pipeline.elastic.nodes.slots import NodeSlots, later_number
from dlac_pipeline.elastic.rank_assignment import Member, Offer, RoundPlan
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.sealed_store import Message, Sealed
from dlac_pipeline.spec.launch_spec import LaunchSpec


class Leadership:
    """Duties of this node while it has the lease."""

    def __init__(
        self,
        connection: StoreConnection,
        slots: NodeSlots,
        election: Election,
        round_: RoundState,
        *,
        launch: LaunchSpec,
        batch_size: int,
    ) -> None:
        self._connection = connection
        self._store = connection.store
        self._slots = slots
        self._election = election
        self._round = round_
        self._launch = launch
        self._batch_size = batch_size
        self._offers: dict[int, Offer] = {}
        """Offers of the nodes that wait."""
        self._to_announce: dict[str, Message] = {}
        self._published: dict[str, Message] = {}
        """This node's writes as the leader of this round."""
        self._end: Message | None = None
        self._replaced: dict[int, Member] = {}
        """Slot of each lost member of this round that was replaced, and the node that took its place."""
        self._replacements = 0
        self._last_call = rank_assignment.LastCall(launch, connection.now)

    def begin_last_call(self) -> None:
        """Wait for the nodes of the next round from now on."""
        with self._connection.lock:
            self._last_call = rank_assignment.LastCall(self._launch, self._connection.now)

    def announce(self, subject: str, message: Message) -> None:
        """Announce something to all members of the round. The last message of a subject counts."""
        with self._connection.lock:
            self._to_announce[subject] = self._round.announcements[subject] = message
        self._connection.hurry()

    def end_run(self, message: Message) -> None:
        """Announce how the run has ended, also to nodes that only wait."""
        with self._connection.lock:
            self._end = {"id": secrets.token_hex(8), "message": message}
        self._connection.hurry()

    def fill_place(self, place: int) -> Member | None:
        """Give the place of a lost node in this round to one that waits, and return it. None: none with as many ranks waits."""
        with self._connection.lock:
            plan = self._round.plan
            assert plan is not None, "this node leads it"
            lost, slots = plan.members[place], [member.slot for member in plan.members]
            fit = [
                slot
                for slot, offer in self._offers.items()
                if slot not in slots and (offer.config, offer.ranks) == (lost.offer.config, lost.offer.ranks)
            ]
            if not fit:
                return None
            slot = min(fit)
            member = replace(lost, slot=slot, id=self._slots.peers[slot].id, offer=self._offers[slot], is_late=True)
            self._round.plan = plan.with_member(member)
            self._replaced[lost.slot] = member
            self._replacements += 1
        self._connection.hurry()
        return member

    @property
    def all_know_the_end(self) -> bool:
        """True if every waiting node has read the end of the run."""
        with self._connection.lock:
            offering = {slot: peer.record for slot, peer in self._slots.peers.items() if "offer" in peer.record}
            waiting = [record for slot, record in offering.items() if not self._round.is_lost(slot)]
            return self._end is None or all(record["knows_end"] == self._end["id"] for record in waiting)

    @property
    def could_grow(self) -> bool:
        """True if nodes wait with which more ranks would train."""
        with self._connection.lock:
            plan = self._round.plan
            if plan is None or not self._offers or plan.nodes >= self._launch.max_nodes:
                return False
            room, config = self._launch.max_nodes - plan.nodes, plan.members[0].offer.config
            members = [member.slot for member in plan.members]
            others = {slot: offer for slot, offer in self._offers.items() if slot not in members}
            waiting = sorted((offer.ranks for offer in others.values() if offer.config == config), reverse=True)[:room]
            mesh = self._launch.mesh
            offered = [*(member.offer.ranks for member in plan.members), *waiting]
            usable = sum(ranks // mesh.tp * mesh.tp for ranks in offered)
            return rank_assignment.usable_ranks(self._batch_size, usable, mesh) > plan.world_size

    def lead(self, found: Sealed, *, repeats: bool) -> None:
        """Read all nodes, form a round if it is time for one, and renew the lease.

        With `repeats` announcements are written again, because a stranger may have overwritten them.
        """
        self._read_nodes(all_of_them=repeats)
        with self._connection.lock:
            lease = dict(self._election.lease)
            announced = dict(self._to_announce)
            message, waits = self._round.message, self._round.waits
            if self._end is not None:
                lease["ended"] = {**self._end, "to": self._uninformed()}
        for subject, news in announced.items():
            version = lease["announced"].get(subject, 0) + 1
            self._publish(name_of_announcement(lease, subject, version), news)
            lease["announced"] = {**lease["announced"], subject: version}
        if waits:
            lease |= self._form_round(lease)
        else:
            lease |= {"message": message, "training": self._end is None, "ready": len(self._offers)}
            lease |= {"refused": self._refuse_waiting(), "version": self._publish_replaced(lease["version"])}
        self._election.renew(found, lease)
        with self._connection.lock:  # a lease that another node has overwritten announces nothing
            stored = self._election.lease["announced"]
            for subject, news in announced.items():
                is_stored = stored.get(subject) == lease["announced"].get(subject)
                if is_stored and self._to_announce.get(subject) is news:
                    del self._to_announce[subject]
        if repeats:
            for name, published in self._published.items():
                self._store.publish(name, published)

    def _read_nodes(self, *, all_of_them: bool) -> None:
        last = self._slots.count(self._election.lease["slots"])
        with self._connection.lock:
            self._election.lease["slots"] = last
        self._slots.read_peers(last, all_of_them=all_of_them)
        with self._connection.lock:
            waiting = {slot: peer.record for slot, peer in self._slots.peers.items() if "offer" in peer.record}
            lost = [slot for slot in waiting if self._round.is_lost(slot)]
            self._offers = {slot: Offer(**each["offer"]) for slot, each in waiting.items() if slot not in lost}

    def _form_round(self, lease: Message) -> Message:
        """Return the next round's state from the lease: it is formed, another node leads, or so many nodes are ready."""
        before, own = self._round.members_before(), self._slots.own
        with self._connection.lock:
            mine = self._round.offer
            assert mine is not None
            offers = {**self._offers, own: mine}
            away = [slot for slot in before if slot not in offers and slot in self._slots.peers]
            busy = [slot for slot in away if not self._round.is_lost(slot)]
        ids = self._slots.ids_of(offers)
        refused = rank_assignment.refuse_other_jobs(offers, ids, own, stay=before)
        offers = {slot: offer for slot, offer in offers.items() if ids[slot] not in refused.get("ids", ())}
        state: Message = {"training": False, "ready": len(offers), "message": {}, "refused": refused}
        if own not in offers or not self._last_call.is_over(len(offers), busy=bool(busy)):
            return state
        knows_most = max(offers, key=lambda slot: (offers[slot].attempt, slot == own))
        if offers[knows_most].attempt > mine.attempt:
            return {**state, "slot": knows_most, "id": ids[knows_most]}
        members = rank_assignment.assign_ranks(
            offers,
            ids,
            leader=own,
            stay=before,
            batch_size=self._batch_size,
            most_nodes=self._launch.max_nodes,
            mesh=self._launch.mesh,
        )
        if not members:
            return state
        plan = RoundPlan.form(members, number=later_number(lease["round"]), port=free_port())
        self._publish_plan(plan)
        return {**state, "round": plan.number, "version": 0, "formed_by": own, "announced": {}, "training": True}

    def _publish_plan(self, plan: RoundPlan) -> None:
        own = self._slots.own
        self._published, self._replaced, self._replacements = {}, {}, 0
        self._publish(name_of_plan(plan.number, own), asdict(plan))
        parts = {f"member/{each.slot}": asdict(plan.part(each.place)) for each in plan.members}
        self._store.publish_all({name: {**part, "formed_by": own} for name, part in parts.items()})

    def _publish_replaced(self, version: int) -> int:
        """Publish who has taken the places of lost nodes since a version of the plan, and return the new version.

        A lost node that lives reads that it has no place.
        """
        with self._connection.lock:
            plan, own, replaced, count = self._round.plan, self._slots.own, dict(self._replaced), self._replacements
        if plan is not None and count > version:
            self._publish(name_of_plan(plan.number, own), asdict(plan))
            parts = {slot: asdict(plan.part(new.place)) for old, new in replaced.items() for slot in (old, new.slot)}
            self._store.publish_all({f"member/{slot}": {**part, "formed_by": own} for slot, part in parts.items()})
        return count

    def _refuse_waiting(self) -> Message:
        """Return the refusal of waiting nodes that are for another job than the round that trains."""
        with self._connection.lock:
            if self._round.plan is None:
                return {}
            offers = {**self._offers, self._slots.own: self._round.plan.members[0].offer}
            ids = self._slots.ids_of(offers)
            return rank_assignment.refuse_other_jobs(offers, ids, self._slots.own, stay=[self._slots.own])

    def _uninformed(self) -> list[str]:
        """Return the ids of nodes that get no verdict in this round: waiting nodes, and lost ones."""
        peers = self._slots.peers
        known = {slot: peer for slot, peer in peers.items() if peer.id and not self._slots.has_left(slot)}
        is_lost = self._round.is_lost
        # of a new node only the id is known
        return [peer.id for slot, peer in known.items() if not peer.record or "offer" in peer.record or is_lost(slot)]

    def _publish(self, name: str, message: Message) -> None:
        self._published[name] = message
        self._store.publish(name, message)
