"""State of a node in its round: the round's plan, the messages of its members, and the announcements of its leader."""

from dataclasses import asdict

from dlac_pipeline.elastic.nodes.connection import StoreConnection
from dlac_pipeline.elastic.nodes.election import Election
from dlac_pipeline.elastic.nodes.slots import NodeSlots, Peer
from dlac_pipeline.elastic.rank_assignment import Offer, RoundPlan
from dlac_pipeline.elastic.sealed_store import Message, SealedStore


class RoundState:
    """State of this node in the round that it waits for or is a member of."""

    def __init__(self, connection: StoreConnection, slots: NodeSlots, election: Election) -> None:
        self.offer: Offer | None = None
        self.plan: RoundPlan | None = None
        """Plan of the last round that this node has read, of which it need not be a member."""
        self.is_member = False
        self.message: Message = {}
        self.announcements: dict[str, Message] = {}
        """Last announcement of the leader on each subject."""
        self._connection = connection
        self._store = connection.store
        self._slots = slots
        self._election = election
        self._versions: dict[str, int] = {}
        self._plan_version = 0
        self._is_displaced = False
        """True if another node has taken this one's place, which was lost for the leader."""
        self._leader_left = False
        """True if the leader waits for another round than this node's."""

    @property
    def waits(self) -> bool:
        """True if this node waits for a round."""
        return self.offer is not None and not self.is_member

    @property
    def cut_off(self) -> bool:
        """True if the store has not answered for too long, or another round has begun without this node."""
        with self._connection.lock:
            left_behind = self.is_member and self.plan is not None and self._election.lease["round"] > self.plan.number
            return self._connection.is_silent or left_behind or self._is_displaced

    def seek(self, offer: Offer) -> None:
        """Wait for the next round from now on."""
        with self._connection.lock:
            self.offer, self.is_member, self.message = offer, False, {}
            self.announcements, self._versions, self._is_displaced = {}, {}, False

    def end(self) -> None:
        """Take part in the round no more. The node that led keeps its lease until another round or its exit."""
        with self._connection.lock:
            self.is_member, self.message = False, {}

    def record(self) -> Message:
        """Return the content of this node's record in its slot."""
        with self._connection.lock:
            record: Message = {"knows_end": self._election.known_end}
            if self.is_member and self.plan is not None:
                record |= {"round": self.plan.number, "message": self.message}
            elif self.offer is not None:
                record["offer"] = asdict(self.offer)
            return record

    def message_of(self, slot: int) -> Message:
        """Return the last message of another member in this round. Empty: none yet."""
        with self._connection.lock:
            lease = self._election.lease
            if self._election.leads:
                record = self._slots.peers[slot].record if slot in self._slots.peers else {}
                same = self.plan is not None and record.get("round") == self.plan.number
                return {**record["message"], "beat": record["beat"]} if same else {}
            return {**lease["message"], "beat": lease["beat"]} if slot == lease["slot"] else {}

    def silent_s(self, slot: int) -> float:
        """Return for how many seconds another member has written nothing new."""
        with self._connection.lock:
            return self._connection.now() - self._heard_at(slot)

    def is_lost(self, slot: int) -> bool:
        """Return whether another member was silent for too long while the store answered."""
        with self._connection.lock:
            deposed = self._is_leader(slot) and (self._election.lease["slot"] != slot or self._leader_left)
            moved_on = self.is_member and self.has_moved_on(slot)
            is_silent = self._heard_at(slot) < self._connection.answered_at - self._connection.timeout_s
            return deposed or moved_on or self._slots.has_left(slot) or is_silent

    def has_moved_on(self, slot: int) -> bool:
        """Return True if another member has taken part in this round and has left it. Known to the leader."""
        with self._connection.lock:
            peer, plan = self._slots.peers.get(slot), self.plan
            if peer is None or plan is None or slot not in [member.slot for member in plan.members]:
                return False
            return peer.entered == plan.number and peer.record.get("round") != plan.number

    def members_before(self) -> list[int]:
        """Return the slots of the last round, as far as this node knows it: one that did not lead it reads its plan now."""
        with self._connection.lock:
            plan, lease = self.plan, self._election.lease
        if plan is None or plan.number != lease["round"]:
            return []
        if not plan.is_whole:
            plan = _read_plan(self._store, number=plan.number, formed_by=lease["formed_by"]) or plan
            with self._connection.lock:
                self.plan = plan
        return [member.slot for member in plan.members]

    def read_plan(self) -> None:
        """Read the plan of a round that was formed, or changed. A member belongs to it from then on."""
        with self._connection.lock:
            lease = self._election.lease
            number, formed_by, version = lease["round"], lease["formed_by"], lease["version"]
            known = 0 if self.plan is None else self.plan.number
            is_known = (number, version) == (known, self._plan_version)
            if not number or is_known or (self.is_member and number != known):
                return  # `cut_off` reports that the others went on
        slot = 0 if formed_by == self._slots.own else self._slots.own
        plan = _read_plan(self._store, number=number, formed_by=formed_by, slot=slot)
        if plan is None:
            return
        with self._connection.lock:
            self._plan_version = version
            if self.is_member:
                self._is_displaced = plan.place_of(self._slots.own, self._slots.id) is None
                return
            self.plan = plan
            if self.offer is not None and plan.place_of(self._slots.own, self._slots.id) is not None:
                self.is_member, self.offer = True, None
                now = self._connection.now()
                for member in plan.members:
                    self._slots.peers.setdefault(member.slot, Peer()).heard_at = now

    def read_announcements(self) -> None:
        """Read the announcements that the leader has made since, and then whether it has left the round."""
        with self._connection.lock:
            lease, number = self._election.lease, 0 if self.plan is None else self.plan.number
            mine = self.is_member and not self._election.leads and lease["round"] == number
            news = {subject: v for subject, v in lease["announced"].items() if self._versions.get(subject) != v}
        for subject, version in news.items() if mine else ():
            message = self._store.read(name_of_announcement(lease, subject, version)).message
            if message is None:
                return
            with self._connection.lock:
                self.announcements[subject], self._versions[subject] = message, version
                self._connection.report_news()
        with self._connection.lock:  # only now: a leader's last announcement counts more than its absence
            self._leader_left = mine and not lease["training"]

    def _heard_at(self, slot: int) -> float:
        peers, lease, answered_at = self._slots.peers, self._election.lease, self._connection.answered_at
        if self._election.leads:
            return peers[slot].heard_at if slot in peers else answered_at
        return self._election.renewed_at if slot in (lease["slot"], lease["formed_by"]) else answered_at

    def _is_leader(self, slot: int) -> bool:
        if self.plan is None or self.plan.members[0].slot != slot:
            return False
        known = self._slots.peers[slot].id if slot in self._slots.peers else ""
        return known in ("", self.plan.members[0].id)


def name_of_announcement(lease: Message, subject: str, version: int) -> str:
    """Return the name of the leader's announcement on a subject in the round of the lease."""
    return f"{name_of_plan(lease['round'], lease['formed_by'])}/{subject}/{version}"


def name_of_plan(number: int, formed_by: int) -> str:
    """Return the name of a round's plan. `formed_by` is the slot of the leader that formed it."""
    return f"round/{number}/{formed_by}"


def _read_plan(store: SealedStore, *, number: int, formed_by: int, slot: int = 0) -> RoundPlan | None:
    """Return the part of a round's plan for the node in `slot`, or else the whole plan. None: no plan is written."""
    part = (store.read(f"member/{slot}").message if slot else None) or {}
    if (part.get("number"), part.pop("formed_by", 0)) == (number, formed_by):
        return RoundPlan.of(part)
    message = store.read(name_of_plan(number, formed_by)).message
    return None if message is None else RoundPlan.of(message)
