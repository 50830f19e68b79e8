"""Heartbeat of a node in the store of a run, the lease of the leader, and the rounds that the leader forms.

A thread talks to the store, so that a silent network does not block the node. See docs/design/0011-nodes.md.

    slots               the last slot: each connection of a node takes the next one
    node/SLOT           a node's record: its offer while it waits for a round, its message to the leader during one
    lease               the leader's record: its slot, its round, its message to all, the end of the run
    member/SLOT         the part of the last round's plan for the node in SLOT
    round/N/SLOT        the plan of round N as the leader in SLOT formed it
    round/N/SLOT/...    the announcements of that leader
"""

import secrets
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict

from dlac_pipeline.elastic import rank_assignment, records
from dlac_pipeline.elastic.rank_assignment import Offer, RoundPlan
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.ranks.watched_time import watched_time
from dlac_pipeline.elastic.sealed_store import Message, Sealed, SealedStore
from dlac_pipeline.spec.launch_spec import LaunchSpec

_BRISK_FOR_S = 5.0
"""Time after the last news in which a node beats as often as if it waited."""
_EVERY_S = 0.25
_QUIET_S = 1.0
_READ_OFTEN = 256
"""Nodes up to which the leader reads all of them every time. Of more it reads as many per second."""
_LAST_TICK_S = 1.0
_REPEAT = 16
"""Ticks after which a leader repeats its announcements: a stranger may have overwritten them."""
_SLOT_TRIES = 16
"""Attempts at a slot in one tick: all nodes of a run may start at once."""
_FORGET = 20
"""Time-outs of silence after which a node is read only now and then."""
_NEWS = ("slot", "round", "announced", "message", "training", "ended")
"""Parts of the lease whose change is news to the nodes that do not lead."""


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
        """`ended_before`: end of a run that an earlier launch announced. None: the one found first. `ids_before`: see `ids`."""
        self.ended_before = ended_before
        self._store = store
        self._launch = launch
        self._batch_size = batch_size
        self._now = watched_time()
        self._id = secrets.token_hex(8)
        self.ids = frozenset({self._id, *ids_before})
        """Ids of this node's connections, past ones included."""
        self.slot = 0
        """This node's number, or 0 before it has one."""
        self._wrote_at = 0
        """Beat of this node's last record in its slot: another node's record there with an earlier one is an old one."""
        self._own = Sealed()
        """This node's record as it is stored."""
        self._beat = self._ticks = self.looks = 0  # knowledge of other nodes changes with `looks` alone
        self._offer: Offer | None = None
        self._offers: dict[int, Offer] = {}
        """Offers of the nodes that wait, known to the leader."""
        self._plan: RoundPlan | None = None
        self._in_round = False
        self._message: Message = {}
        self._to_announce: dict[str, Message] = {}
        self._announced: dict[str, Message] = {}
        self._versions: dict[str, int] = {}
        self._leader_left = False
        """True if the leader waits for another round than this node's."""
        self._published: dict[str, Message] = {}
        """This node's writes as the leader of this round."""
        self._end: Message | None = None
        self._lease: Message = records.NO_LEASE
        self._lease_raw = b""
        self._lease_at = self._lease_raw_at = self._spoke_at = self._now()
        self._peers: dict[int, records.Peer] = {}
        self._last_call = rank_assignment.LastCall(launch, self._now)
        self._leaves = False
        self._brisk_until = self._now() + _BRISK_FOR_S
        self._closing = threading.Event()
        self._hurries = threading.Event()
        self._has_news = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def seek(self, offer: Offer) -> None:
        """Wait for the next round from now on."""
        with self._lock:
            self._offer, self._in_round, self._message = offer, False, {}
            self._announced, self._versions = {}, {}
            self._last_call = rank_assignment.LastCall(self._launch, self._now)
        self._hurries.set()

    @property
    def plan(self) -> RoundPlan | None:
        """The plan of the round that this node is a member of."""
        with self._lock:
            return self._plan if self._in_round else None

    @property
    def place(self) -> int | None:
        """This node's place in its round. None: it is no member of one."""
        plan = self.plan
        return None if plan is None else plan.place_of(self.slot, self._id)

    @property
    def others_train(self) -> bool:
        """True if a live leader has a round without this node."""
        with self._lock:
            fresh = self._now() - self._lease_at < self._launch.node_timeout_s
            return fresh and not self._in_round and self._lease["round"] > 0 and self._lease["training"]

    @property
    def refused(self) -> str:
        """Reason why the leader forms no round with this node. Empty: it would."""
        with self._lock:
            hosts = self._lease.get("refused", {})
            return str(hosts["why"]) if self._id in hosts.get("ids", ()) else ""

    @property
    def nodes_ready(self) -> int:
        """Number of nodes that wait for a round, this one included, as far as it knows."""
        with self._lock:
            return max(1, int(self._lease.get("ready", 0)))

    @property
    def nodes_known(self) -> int:
        """Number of nodes that wait for a round or took part in the last one, as far as this node knows."""
        with self._lock:
            return max(self.nodes_ready, 1 if self._plan is None else self._plan.nodes)

    @property
    def is_foreign(self) -> bool:
        """True if the lease has content that this node's key does not open."""
        with self._lock:
            return self._lease is records.NO_LEASE and bool(self._lease_raw)

    @property
    def end(self) -> Message | None:
        """The end of the run since this node came."""
        with self._lock:
            found = self._lease["ended"]
            news = found is not None and found["id"] != self.ended_before and not self.ids.isdisjoint(found["to"])
            return found["message"] if news else None

    @property
    def cut_off(self) -> bool:
        """True if the store has not answered for too long, or another round has begun without this node."""
        with self._lock:
            silent = self._spoke_at < self._now() - self._launch.node_timeout_s
            left_behind = self._in_round and self._plan is not None and self._lease["round"] > self._plan.number
            return silent or left_behind

    @property
    def could_grow(self) -> bool:
        """True if nodes wait with which more ranks would train. Known to the leader."""
        with self._lock:
            if self._plan is None or not self._offers or self._plan.nodes >= self._launch.max_nodes:
                return False
            room, config = self._launch.max_nodes - self._plan.nodes, self._plan.members[0].offer.config
            members = [member.slot for member in self._plan.members]
            others = {slot: offer for slot, offer in self._offers.items() if slot not in members}
            waiting = sorted((offer.ranks for offer in others.values() if offer.config == config), reverse=True)[:room]
            offered = sum(member.offer.ranks for member in self._plan.members) + sum(waiting)
            return rank_assignment.usable_ranks(self._batch_size, offered) > self._plan.world_size

    def publish(self, message: Message, *, hurry: bool = False) -> None:
        """Replace this node's message: to the leader, or, from the leader, to all. Without `hurry` with the next heartbeat."""
        with self._lock:
            self._message = message
        if hurry:
            self._hurries.set()

    def wait_for_news(self, within_s: float) -> None:
        """Wait until the lease has something new for this node, so long at most."""
        self._has_news.wait(within_s)
        self._has_news.clear()

    def announce(self, subject: str, message: Message) -> None:
        """Announce something to all members of the round. The last message of a subject counts."""
        with self._lock:
            self._to_announce[subject] = self._announced[subject] = message
        self._hurries.set()

    def announced(self, subject: str) -> Message | None:
        """Return the leader's announcement."""
        with self._lock:
            return self._announced.get(subject)

    def message_of(self, slot: int) -> Message:
        """Return the last message of another member in this round. Empty: none yet."""
        with self._lock:
            if self.leads:
                record = self._peers[slot].record if slot in self._peers else {}
                same = self._plan is not None and record.get("round") == self._plan.number
                return {**record["message"], "beat": record["beat"]} if same else {}
            return {**self._lease["message"], "beat": self._lease["beat"]} if slot == self._lease["slot"] else {}

    def silent_s(self, slot: int) -> float:
        """Return for how many seconds another member has written nothing new."""
        with self._lock:
            return self._now() - self._heard_at(slot)

    def is_lost(self, slot: int) -> bool:
        """Return whether another member was silent for too long while the store answered."""
        with self._lock:
            deposed = self._is_leader(slot) and (self._lease["slot"] != slot or self._leader_left)
            moved_on = self._in_round and self.has_moved_on(slot)
            is_silent = self._heard_at(slot) < self._spoke_at - self._launch.node_timeout_s
            return deposed or moved_on or self._gone(slot) or is_silent

    def has_moved_on(self, slot: int) -> bool:
        """Return True if another member has taken part in this round and has left it. Known to the leader."""
        with self._lock:
            peer, number = self._peers.get(slot), 0 if self._plan is None else self._plan.number
            return peer is not None and peer.entered == number and peer.record.get("round") != number

    def end_round(self) -> None:
        """Take part in the round no more. The node that led keeps its lease until another round or its exit."""
        with self._lock:
            self._in_round, self._message = False, {}

    def end_run(self, message: Message) -> None:
        """Announce how the run has ended, also to nodes that only wait."""
        with self._lock:
            self._end = {"id": secrets.token_hex(8), "message": message}
        self._hurries.set()

    @property
    def all_know_the_end(self) -> bool:
        """Return True if every waiting node has read the end of the run. Known to the leader."""
        with self._lock:
            offering = {slot: peer.record for slot, peer in self._peers.items() if "offer" in peer.record}
            waiting = [record for slot, record in offering.items() if not self.is_lost(slot)]
            return self._end is None or all(record["knows_end"] == self._end["id"] for record in waiting)

    def close(self, *, leaves: bool) -> None:
        """Stop. A node that leaves reports it, and a leader returns its lease. A thread that hangs is abandoned."""
        self._leaves = leaves
        self._closing.set()
        self._hurries.set()
        self._thread.join(_LAST_TICK_S if leaves else 0)

    # The thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._hurries.clear()
            with suppress(RuntimeError, OSError, KeyError, TypeError, ValueError):  # `cut_off` reports it
                self._tick()
                with self._lock:
                    self._spoke_at = self._now()
                    self.looks += 1
            self._hurries.wait(self._pause_s())
        if self._leaves and self.slot:
            with suppress(RuntimeError, OSError):
                self._tick()
                self._depart()

    def _pause_s(self) -> float:
        with self._lock:
            if self.leads:
                return _EVERY_S * max(1.0, len(self._peers) / _READ_OFTEN)
            trains = self._in_round and bool(self._announced)
            is_quiet = (trains or self.others_train) and self._now() > self._brisk_until
            return min(_QUIET_S, self._launch.node_timeout_s / 10) if is_quiet else _EVERY_S

    def _note_news(self) -> None:
        self._brisk_until = self._now() + _BRISK_FOR_S
        self._has_news.set()

    def _tick(self) -> None:
        self._ticks += 1
        lease = self._store.read(records.LEASE)
        self._note_lease(lease)
        with self._lock:  # nodes with another key may meet here: this node would only overwrite what they write
            is_foreign = self.is_foreign and self._lease_raw_at > self._now() - self._launch.node_timeout_s
        if not self.slot and not is_foreign:
            self._take_slot()
        if not self.slot:
            return
        self._publish_record()
        if not self.slot:
            return
        if self.slot > self._lease["slots"]:  # a stranger may have deleted the last slot
            found = self._store.read("slots")
            if found.message is None or found.message["last"] < self.slot:
                self._store.replace("slots", found, {"last": self.slot, "by": self._id})
        if self.leads:
            self._lead(lease)
        elif self._may_lead(lease):
            self._take_lease(lease)
        self._read_round()
        self._read_announcements()

    @property
    def leads(self) -> bool:
        """True if this node has the lease."""
        return bool(self.slot) and (self._lease["slot"], self._lease["id"]) == (self.slot, self._id)

    def _note_lease(self, found: Sealed) -> None:
        with self._lock:
            if found.raw == self._lease_raw:
                return
            self._lease_raw, self._lease_raw_at = found.raw, self._now()
            if found.message is None or found.message["beat"] < self._lease["beat"]:
                return  # a stranger's, or an old one that a stranger wrote again
            if any(found.message.get(name) != self._lease.get(name) for name in _NEWS):
                self._note_news()
            self._lease, self._lease_at = found.message, self._now()
            if self.ended_before is None:
                ended = self._lease["ended"]
                self.ended_before = "" if ended is None else str(ended["id"])

    def _publish_record(self) -> None:
        self._beat = records.later_number(self._beat)
        with self._lock:
            ended = self._lease["ended"]
            known = ended is not None and (ended["id"] == self.ended_before or not self.ids.isdisjoint(ended["to"]))
            record: Message = {"id": self._id, "beat": self._beat, "knows_end": ended["id"] if known else None}
            if self._in_round and self._plan is not None:
                record |= {"round": self._plan.number, "message": self._message}
            elif self._offer is not None:
                record["offer"] = asdict(self._offer)
        self._write_record(record)

    def _write_record(self, record: Message) -> None:
        """Write this node's record, or give the slot up: another node has it, too, where a stranger deleted the last slot."""
        for _ in range(2):
            found = self._own = self._store.replace(f"node/{self.slot}", self._own, record)
            other = found.message
            if other is not None and (other["id"], other["beat"]) == (self._id, record["beat"]):
                self._wrote_at = record["beat"]
                return
            if other is not None and other["id"] != self._id and other["beat"] >= self._wrote_at:
                with self._lock:
                    self.slot, self._own = 0, Sealed()
                return

    def _may_lead(self, found: Sealed) -> bool:
        """Return whether this node, which waits, takes the lease: it is free, or its holder is silent or has left."""
        with self._lock:
            if self._offer is None or self._in_round or self.refused:  # as the leader it would refuse no other job
                return False
            heard_at = self._lease_raw_at if self._lease is records.NO_LEASE else self._lease_at
            is_silent = heard_at < self._now() - self._launch.node_timeout_s
            is_new = not found.raw and self._lease is records.NO_LEASE
            return is_new or is_silent or (bool(self._lease["beat"]) and not self._lease["slot"])

    def _lead(self, found: Sealed) -> None:
        """Read all nodes, form a round if it is time for one, and renew the lease."""
        self._read_nodes()
        with self._lock:
            lease = dict(self._lease)
            announced = dict(self._to_announce)
            message, waits = self._message, self._offer is not None and not self._in_round
            if self._end is not None:
                lease["ended"] = {**self._end, "to": self._uninformed()}
        for subject, news in announced.items():
            version = lease["announced"].get(subject, 0) + 1
            self._publish(records.name_of_announcement(lease, subject, version), news)
            lease["announced"] = {**lease["announced"], subject: version}
        if waits:
            lease |= self._gather(lease)
        else:
            lease |= {"message": message, "training": self._end is None, "ready": len(self._offers), "refused": {}}
            with self._lock:  # nodes that wait may be for another job than the round that trains
                if self._plan is not None:
                    offers = {**self._offers, self.slot: self._plan.members[0].offer}
                    ids = self._ids_of(offers)
                    lease["refused"] = rank_assignment.refuse_other_jobs(offers, ids, self.slot, stay=[self.slot])
        self._write_lease(found, lease)
        with self._lock:  # a lease that another node has overwritten announces nothing
            done = [each for each in announced if self._lease["announced"].get(each) == lease["announced"].get(each)]
            for subject in done:
                if self._to_announce.get(subject) is announced[subject]:
                    del self._to_announce[subject]
        if self._ticks % _REPEAT == 0:
            for name, published in self._published.items():
                self._store.publish(name, published)

    def _ids_of(self, slots: Iterable[int]) -> dict[int, str]:
        return {slot: self._id if slot == self.slot else self._peers[slot].id for slot in slots}

    def _uninformed(self) -> list[str]:
        """Return the ids of nodes that get no verdict in this round: waiting nodes, and lost ones."""
        known = {slot: peer for slot, peer in self._peers.items() if peer.id and not self._gone(slot)}
        # of a new node only the id is known
        return [
            peer.id for slot, peer in known.items() if not peer.record or "offer" in peer.record or self.is_lost(slot)
        ]

    def _publish(self, name: str, message: Message) -> None:
        self._published[name] = message
        self._store.publish(name, message)

    def _take_lease(self, found: Sealed) -> None:
        """Lead from now on. The node that led, and was silent, is lost already."""
        with self._lock:
            before, id_before, silent_since = self._lease["slot"], self._lease["id"], self._lease_at
        mine = {"slot": self.slot, "id": self._id, "training": False, "refused": {}, "message": {}}
        self._write_lease(found, {**self._lease, **mine})
        with self._lock:
            if self.leads and before:
                self._peers[before] = records.Peer(id=id_before, heard_at=silent_since)
        self._hurries.set()

    def _write_lease(self, found: Sealed, lease: Message) -> None:
        renewed = {**lease, "beat": records.later_number(self._lease["beat"])}
        self._note_lease(self._store.replace(records.LEASE, found, renewed))

    def _take_slot(self) -> None:
        found = self._store.read("slots")
        for _ in range(_SLOT_TRIES):
            slot = self._last_slot(found) + 1
            wanted = {"last": slot, "by": self._id}
            found = self._store.replace("slots", found, wanted)
            if found.message == wanted:
                self.slot, self._wrote_at = slot, records.later_number(0) - int(1000 * self._launch.node_timeout_s)
                return

    def _last_slot(self, found: Sealed) -> int:
        """Return the last slot. A stranger may have deleted its record, or written an old one again."""
        return max(self.slot, int(self._lease["slots"]), 0 if found.message is None else int(found.message["last"]))

    def _read_nodes(self) -> None:
        slots = self._store.read("slots")
        with self._lock:
            last = self._last_slot(slots)
            self._lease["slots"] = last
            now, forgotten_s = self._now(), _FORGET * self._launch.node_timeout_s
            for slot in range(1, last + 1):
                self._peers.setdefault(slot, records.Peer(heard_at=now))
            all_of_them = self._ticks % _REPEAT == 0
            known = [slot for slot in self._peers if slot != self.slot and not self._gone(slot)]
            read = [slot for slot in known if all_of_them or now - self._peers[slot].heard_at < forgotten_s]
            wrote = [slot for slot in read if self._peers[slot].beat >= 0]
            silent = [slot for slot in read if self._peers[slot].beat < 0]
        found = zip(wrote, self._store.read_all([f"node/{slot}" for slot in wrote]), strict=True)
        new = ((slot, self._store.read(f"node/{slot}")) for slot in silent)
        for slot, sealed in (*found, *new):
            with self._lock:
                peer, record = self._peers[slot], sealed.message
                if record is None or record["beat"] <= peer.beat:
                    continue
                is_first, peer.beat, peer.id = peer.beat < 0, record["beat"], record["id"]
                if not is_first or "gone" in record:
                    peer.record, peer.heard_at = record, self._now()
                    peer.entered = record.get("round", peer.entered)
        with self._lock:
            waiting = {slot: peer.record for slot, peer in self._peers.items() if "offer" in peer.record}
            self._offers = {slot: Offer(**each["offer"]) for slot, each in waiting.items() if not self.is_lost(slot)}

    def _gather(self, lease: Message) -> Message:
        """Return the next round's state from the lease: it is formed, another node leads, or so many nodes are ready."""
        before = self._members_before(lease)
        with self._lock:
            assert self._offer is not None
            mine = self._offer
            offers = {**self._offers, self.slot: mine}
            busy = [slot for slot in before if slot not in offers and slot in self._peers and not self.is_lost(slot)]
        ids = self._ids_of(offers)
        refused = rank_assignment.refuse_other_jobs(offers, ids, self.slot, stay=before)
        offers = {slot: offer for slot, offer in offers.items() if ids[slot] not in refused.get("ids", ())}
        state: Message = {"training": False, "ready": len(offers), "message": {}, "refused": refused}
        if self.slot not in offers or not self._last_call.is_over(len(offers), busy=bool(busy)):
            return state
        knows_most = max(offers, key=lambda slot: (offers[slot].attempt, slot == self.slot))
        if offers[knows_most].attempt > mine.attempt:
            return {**state, "slot": knows_most, "id": ids[knows_most]}
        members = rank_assignment.assign_ranks(
            offers, ids, leader=self.slot, stay=before, batch_size=self._batch_size, most_nodes=self._launch.max_nodes
        )
        plan = RoundPlan.form(members, number=records.later_number(lease["round"]), port=free_port())
        self._published = {}
        self._publish(records.name_of_plan(plan.number, self.slot), asdict(plan))
        parts = {f"member/{each.slot}": asdict(plan.part(each.place)) for each in plan.members}
        self._store.publish_all({name: {**part, "formed_by": self.slot} for name, part in parts.items()})
        return {**state, "round": plan.number, "formed_by": self.slot, "announced": {}, "training": True}

    def _members_before(self, lease: Message) -> list[int]:
        """Return the slots of the last round, as far as this node knows it: one that did not lead it reads its plan now."""
        with self._lock:
            plan = self._plan
        if plan is None or plan.number != lease["round"]:
            return []
        if not plan.is_whole:
            plan = records.read_round(self._store, number=plan.number, formed_by=lease["formed_by"]) or plan
            with self._lock:
                self._plan = plan
        return [member.slot for member in plan.members]

    def _read_round(self) -> None:
        """Read the plan of a round that was formed. A member belongs to it from then on."""
        with self._lock:
            number, formed_by = self._lease["round"], self._lease["formed_by"]
            known = 0 if self._plan is None else self._plan.number
            if not number or number == known or self._in_round:
                return  # `cut_off` reports that the others went on
        slot = 0 if formed_by == self.slot else self.slot
        plan = records.read_round(self._store, number=number, formed_by=formed_by, slot=slot)
        if plan is None:
            return
        with self._lock:
            self._plan = plan
            if self._offer is not None and plan.place_of(self.slot, self._id) is not None:
                self._in_round, self._offer = True, None
                now = self._now()
                for member in plan.members:
                    self._peers.setdefault(member.slot, records.Peer()).heard_at = now

    def _read_announcements(self) -> None:
        with self._lock:
            lease, number = self._lease, 0 if self._plan is None else self._plan.number
            mine = self._in_round and not self.leads and lease["round"] == number
            news = {subject: v for subject, v in lease["announced"].items() if self._versions.get(subject) != v}
        for subject, version in news.items() if mine else ():
            message = self._store.read(records.name_of_announcement(lease, subject, version)).message
            if message is None:
                return
            with self._lock:
                self._announced[subject], self._versions[subject] = message, version
                self._note_news()
        with self._lock:  # only now: a leader's last announcement counts more than its absence
            self._leader_left = mine and not lease["training"]

    def _heard_at(self, slot: int) -> float:
        if self.leads:
            return self._peers[slot].heard_at if slot in self._peers else self._spoke_at
        return self._lease_at if slot in (self._lease["slot"], self._lease["formed_by"]) else self._spoke_at

    def _is_leader(self, slot: int) -> bool:
        if self._plan is None or self._plan.members[0].slot != slot:
            return False
        known = self._peers[slot].id if slot in self._peers else ""
        return known in ("", self._plan.members[0].id)

    def _gone(self, slot: int) -> bool:
        return bool(slot in self._peers and self._peers[slot].record.get("gone"))

    def _depart(self) -> None:
        self._beat = records.later_number(self._beat)
        self._write_record({"id": self._id, "beat": self._beat, "gone": True, "knows_end": None})
        lease = self._store.read(records.LEASE)
        if lease.message is not None and lease.message["slot"] == self.slot:
            self._store.replace(records.LEASE, lease, {**lease.message, "slot": 0, "training": False})
