"""One node's heartbeat in the store of a run, the lease of the node that leads, and the rounds that the leader forms.

A thread talks to the store a few times a second, so that a silent network does not block the node. A node that leads reads the
records of all nodes. Any other node reads one record, the lease, and what that announces. Only this node's own clock counts.

    slots               counter: each connection of a node takes the next number
    node/SLOT           a node's record: its offer while it waits for a round, its message to the leader during one
    lease               the leader's record: its slot, its round, its message to all, how the run has ended
    round/N/SLOT        the plan of round N as the leader in SLOT formed it
    round/N/SLOT/...    what that leader announced
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from dlac_pipeline.elastic.rank_assignment import Offer, RoundPlan, assign_ranks, usable_ranks
from dlac_pipeline.elastic.sealed_store import Message, Sealed, SealedStore
from dlac_pipeline.launch_spec import LaunchSpec
from dlac_pipeline.ranks.addresses import free_port
from dlac_pipeline.ranks.watched_time import watched_time

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

_EVERY_S = 0.25
_LAST_TICK_S = 1.0
_LEASE = "lease"
_REPEAT = 16
"""Ticks after which a leader writes again what it announced: a stranger may have overwritten it."""
_FORGET = 20
"""Time-outs of silence after which a node is read only now and then."""
_NO_LEASE: Message = {
    "slot": 0,
    "beat": 0,
    "round": 0,
    "formed_by": 0,
    "announced": {},
    "message": {},
    "training": False,
    "ended": None,
}


@dataclass(slots=True)
class _Peer:
    """Another node, as the leader has read it."""

    record: Message = field(default_factory=dict)
    heard_at: float = 0.0
    entered: int = 0
    """Last round that it took part in."""


class Heartbeat:
    """Of one node, over one connection to the store of its run."""

    def __init__(self, store: SealedStore, launch: LaunchSpec, *, batch_size: int, ended_before: str | None) -> None:
        """`ended_before` names the end of a run that an earlier launch announced; None: take the one that is found first."""
        self.ended_before = ended_before
        self._store = store
        self._launch = launch
        self._batch_size = batch_size
        self._now = watched_time()
        self._slot = 0
        self._beat = 0
        self._offer: Offer | None = None
        self._offers: dict[int, Offer] = {}
        """Of the nodes that wait, known to the leader."""
        self._plan: RoundPlan | None = None
        self._in_round = False
        self._message: Message = {}
        self._to_announce: dict[str, Message] = {}
        self._announced: dict[str, Message] = {}
        self._versions: dict[str, int] = {}
        self._leader_left = False
        """Whether the leader waits for another round than the one that this node is in."""
        self._published: dict[str, Message] = {}
        """What this node wrote as the leader of this round."""
        self._end: Message | None = None
        self._refused = ""
        self._lease: Message = _NO_LEASE
        self._lease_raw = b""
        self._lease_at = self._spoke_at = self._now()
        self._peers: dict[int, _Peer] = {}
        self._enough_since: float | None = None
        self._leaves = False
        self._closing = threading.Event()
        self._hurries = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    # The node's main thread

    def seek(self, offer: Offer) -> None:
        """Wait for the next round from now on."""
        with self._lock:
            self._offer, self._in_round, self._message = offer, False, {}
            self._announced, self._versions = {}, {}
            self._enough_since = None
        self._hurries.set()

    @property
    def store(self) -> Store:
        """The store beneath, for what needs no seal."""
        return self._store.store

    @property
    def plan(self) -> RoundPlan | None:
        """The plan of the round that this node is a member of."""
        with self._lock:
            return self._plan if self._in_round else None

    @property
    def slot(self) -> int:
        """This node's number."""
        return self._slot

    @property
    def others_train(self) -> bool:
        """Whether a live leader has a round without this node."""
        with self._lock:
            fresh = self._now() - self._lease_at < self._launch.node_timeout_s
            return fresh and not self._in_round and self._lease["round"] > 0 and self._lease["training"]

    @property
    def refused(self) -> str:
        """Why the leader forms no round; empty: it would."""
        with self._lock:
            return self._refused or str(self._lease.get("refused", ""))

    @property
    def nodes_ready(self) -> int:
        """Number of nodes that wait for a round, this one included, as far as it knows."""
        with self._lock:
            return max(1, int(self._lease.get("ready", 0)))

    @property
    def is_foreign(self) -> bool:
        """Whether the lease has content that this node's key does not open."""
        with self._lock:
            return self._lease is _NO_LEASE and bool(self._lease_raw)

    @property
    def end(self) -> Message | None:
        """How the run has ended since this node came."""
        with self._lock:
            found = self._lease["ended"]
            return found["message"] if found is not None and found["id"] != self.ended_before else None

    @property
    def cut_off(self) -> bool:
        """Whether the store has not answered for too long, or the others have begun another round without this node."""
        with self._lock:
            silent = self._spoke_at < self._now() - self._launch.node_timeout_s
            left_behind = self._in_round and self._plan is not None and self._lease["round"] > self._plan.number
            return silent or left_behind

    @property
    def could_grow(self) -> bool:
        """Whether nodes wait with which there would be more ranks; known to the leader."""
        with self._lock:
            if self._plan is None or not self._offers or len(self._plan.members) >= self._launch.max_nodes:
                return False
            room = self._launch.max_nodes - len(self._plan.members)
            waiting = sorted((offer.ranks for offer in self._offers.values()), reverse=True)[:room]
            offered = sum(member.offer.ranks for member in self._plan.members) + sum(waiting)
            return usable_ranks(self._batch_size, offered) > self._plan.world_size

    def publish(self, message: Message) -> None:
        """Replace this node's message: to the leader, or, from the leader, to all."""
        with self._lock:
            self._message = message

    def announce(self, subject: str, message: Message) -> None:
        """Announce something to all members of the round; the last message of a subject stands."""
        with self._lock:
            self._to_announce[subject] = self._announced[subject] = message
        self._hurries.set()

    def announced(self, subject: str) -> Message | None:
        """Return what the leader announced."""
        with self._lock:
            return self._announced.get(subject)

    def message_of(self, slot: int) -> Message:
        """Return the last message of another member in this round; empty: none yet."""
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

    def lost(self, slot: int) -> bool:
        """Return whether another member was silent for too long while the store answered."""
        with self._lock:
            deposed = self._is_leader(slot) and (self._lease["slot"] != slot or self._leader_left)
            left = self._in_round and self.has_moved_on(slot)
            return (
                deposed
                or left
                or self._gone(slot)
                or self._heard_at(slot) < self._spoke_at - self._launch.node_timeout_s
            )

    def has_moved_on(self, slot: int) -> bool:
        """Return whether another member has taken part in this round and does no more; known to the leader."""
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
        """Whether every node that waits has read how the run ended; known to the leader."""
        with self._lock:
            waiting = [
                peer.record for slot, peer in self._peers.items() if "offer" in peer.record and not self.lost(slot)
            ]
            return self._end is None or all(record["knows_end"] == self._end["id"] for record in waiting)

    def close(self, *, leaves: bool) -> None:
        """Stop. A node that leaves says so, and a leader gives its lease back; a thread that hangs is left to itself."""
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
            self._hurries.wait(_EVERY_S)
        if self._leaves and self._slot:
            with suppress(RuntimeError, OSError):
                self._tick()
                self._depart()

    def _tick(self) -> None:
        if not self._slot:
            self._slot = self._store.count_up("slots", 1)
        lease = self._store.read(_LEASE)
        self._note_lease(lease)
        self._publish_record()
        if self.leads:
            self._lead(lease)
        elif self._may_lead(lease):
            self._take_lease(lease)
        self._read_round()
        self._read_announcements()

    @property
    def leads(self) -> bool:
        """Whether this node has the lease."""
        return bool(self._slot) and self._lease["slot"] == self._slot

    def _note_lease(self, found: Sealed) -> None:
        with self._lock:
            if found.raw != self._lease_raw:
                self._lease_raw, self._lease_at = found.raw, self._now()
                if (
                    found.message is not None and found.message["beat"] >= self._lease["beat"]
                ):  # no old one, written again
                    self._lease = found.message
            ended = self._lease["ended"]
            if self.ended_before is None:
                self.ended_before = "" if ended is None else str(ended["id"])

    def _publish_record(self) -> None:
        self._beat += 1
        with self._lock:
            ended = self._lease["ended"]
            record: Message = {"beat": self._beat, "knows_end": ended and ended["id"]}
            if self._in_round and self._plan is not None:
                record |= {"round": self._plan.number, "message": self._message}
            elif self._offer is not None:
                record["offer"] = asdict(self._offer)
        self._store.publish(f"node/{self._slot}", record)

    def _may_lead(self, found: Sealed) -> bool:
        """Whether this node, which waits, takes the lease: nobody has it, or its holder is silent or has left."""
        with self._lock:
            if self._offer is None or self._in_round:
                return False
            silent = self._lease_at < self._now() - self._launch.node_timeout_s
            return (
                (not found.raw and self._lease is _NO_LEASE)
                or (bool(self._lease["beat"]) and not self._lease["slot"])
                or silent
            )

    def _lead(self, found: Sealed) -> None:
        """Read all nodes, form a round if it is time for one, and renew the lease."""
        self._read_nodes()
        with self._lock:
            lease = dict(self._lease)
            announced, self._to_announce = self._to_announce, {}
            message, waits = self._message, self._offer is not None and not self._in_round
            if self._end is not None:
                lease["ended"] = self._end
        for subject, news in announced.items():
            version = lease["announced"].get(subject, 0) + 1
            self._publish(_announcement(lease, subject, version), news)
            lease["announced"] = {**lease["announced"], subject: version}
        if waits:
            lease |= self._gather(lease)
        else:
            lease |= {"message": message, "training": self._end is None, "ready": len(self._offers)}
        self._write_lease(found, lease)
        if self._beat % _REPEAT == 0:
            for name, published in self._published.items():
                self._store.publish(name, published)

    def _publish(self, name: str, message: Message) -> None:
        self._published[name] = message
        self._store.publish(name, message)

    def _take_lease(self, found: Sealed) -> None:
        """Lead from now on. The node that led, and was silent, is lost already."""
        with self._lock:
            before, silent_since = self._lease["slot"], self._lease_at
        self._write_lease(found, {**self._lease, "slot": self._slot, "training": False, "refused": "", "message": {}})
        with self._lock:
            if self.leads and before:
                self._peers[before] = _Peer(heard_at=silent_since)
        self._hurries.set()

    def _write_lease(self, found: Sealed, lease: Message) -> None:
        self._note_lease(self._store.replace(_LEASE, found, {**lease, "beat": self._lease["beat"] + 1}))

    def _read_nodes(self) -> None:
        last = self._store.count_up("slots", 0)
        with self._lock:
            now, forgotten_s = self._now(), _FORGET * self._launch.node_timeout_s
            for slot in range(1, last + 1):
                self._peers.setdefault(slot, _Peer(heard_at=now))
            known = {
                slot: now - peer.heard_at < forgotten_s for slot, peer in self._peers.items() if not self._gone(slot)
            }
            read = [
                slot for slot, fresh in known.items() if slot != self._slot and (fresh or self._beat % _REPEAT == 0)
            ]
            wrote = [slot for slot in read if self._peers[slot].record]
        found = zip(wrote, self._store.read_all([f"node/{slot}" for slot in wrote]), strict=True)
        new = ((slot, self._store.read(f"node/{slot}")) for slot in read if slot not in wrote)
        for slot, sealed in (*found, *new):
            with self._lock:
                peer, record = self._peers[slot], sealed.message
                if record is not None and record["beat"] > peer.record.get("beat", 0):
                    peer.record, peer.heard_at = record, self._now()
                    peer.entered = record.get("round", peer.entered)
        with self._lock:
            waiting = {slot: peer.record for slot, peer in self._peers.items() if "offer" in peer.record}
            self._offers = {slot: Offer(**each["offer"]) for slot, each in waiting.items() if not self.lost(slot)}

    def _gather(self, lease: Message) -> Message:
        """Return what the lease says of the next round: that it is formed, who leads instead, or how many nodes are ready."""
        with self._lock:
            assert self._offer is not None
            offers = {**self._offers, self._slot: self._offer}
            before = self._members_before(lease)
            busy = [slot for slot in before if slot not in offers and slot in self._peers and not self.lost(slot)]
        said: Message = {
            "training": False,
            "ready": len(offers),
            "message": {},
            "refused": _differs(offers, self._slot),
        }
        now, enough = self._now(), len(offers) >= self._launch.min_nodes
        if busy or not enough or said["refused"]:
            self._enough_since = None
            return said
        self._enough_since = now if self._enough_since is None else self._enough_since
        if len(offers) < self._launch.max_nodes and now - self._enough_since < self._launch.last_call_s:
            return said
        knows_most = max(offers, key=lambda slot: (offers[slot].attempt, slot == self._slot))
        if knows_most != self._slot and offers[knows_most].attempt > self._offer.attempt:
            return {**said, "slot": knows_most}
        members = assign_ranks(
            offers, leader=self._slot, stay=before, batch_size=self._batch_size, most_nodes=self._launch.max_nodes
        )
        plan = RoundPlan(number=lease["round"] + 1, port=free_port(), members=members)
        self._published = {}
        self._publish(f"round/{plan.number}/{self._slot}", plan.message())
        return {**said, "round": plan.number, "formed_by": self._slot, "announced": {}, "training": True}

    def _members_before(self, lease: Message) -> list[int]:
        """Return the slots of the last round, as far as this node knows it."""
        if self._plan is None or self._plan.number != lease["round"]:
            return []
        return [member.slot for member in self._plan.members]

    def _read_round(self) -> None:
        """Read the plan of a round that was formed; a member is in it from then on."""
        with self._lock:
            number, formed_by = self._lease["round"], self._lease["formed_by"]
            known = 0 if self._plan is None else self._plan.number
        if not number or number == known:
            return
        message = self._store.read(f"round/{number}/{formed_by}").message
        if message is None:
            return
        plan = RoundPlan.of(message)
        with self._lock:
            if self._in_round:
                return  # `cut_off` reports that the others went on
            self._plan = plan
            if self._offer is not None and plan.place_of(self._slot) is not None:
                self._in_round, self._offer, self._enough_since = True, None, None
                now = self._now()
                for member in plan.members:
                    self._peers.setdefault(member.slot, _Peer()).heard_at = now

    def _read_announcements(self) -> None:
        with self._lock:
            lease, mine = self._lease, self._in_round and not self.leads
            news = {subject: v for subject, v in lease["announced"].items() if self._versions.get(subject) != v}
        for subject, version in news.items() if mine else ():
            message = self._store.read(_announcement(lease, subject, version)).message
            if message is None:
                return
            with self._lock:
                self._announced[subject], self._versions[subject] = message, version
        with self._lock:  # only now: a leader's last announcement counts more than its absence
            self._leader_left = mine and not lease["training"]

    def _heard_at(self, slot: int) -> float:
        if self.leads:
            return self._peers[slot].heard_at if slot in self._peers else self._spoke_at
        return self._lease_at if slot in (self._lease["slot"], self._lease["formed_by"]) else self._spoke_at

    def _is_leader(self, slot: int) -> bool:
        return self._plan is not None and self._plan.members[0].slot == slot

    def _gone(self, slot: int) -> bool:
        return bool(slot in self._peers and self._peers[slot].record.get("gone"))

    def _depart(self) -> None:
        self._beat += 1
        self._store.publish(f"node/{self._slot}", {"beat": self._beat, "gone": True, "knows_end": None})
        lease = self._store.read(_LEASE)
        if lease.message is not None and lease.message["slot"] == self._slot:
            self._store.replace(_LEASE, lease, {**lease.message, "slot": 0, "training": False})


def _announcement(lease: Message, subject: str, version: int) -> str:
    return f"round/{lease['round']}/{lease['formed_by']}/{subject}/{version}"


def _differs(offers: dict[int, Offer], mine: int) -> str:
    """Return which nodes would train another job; empty: none."""
    hosts = [offer.host for offer in offers.values() if offer.config != offers[mine].config]
    return f"found another one on {', '.join(hosts)} than on {offers[mine].host}" if hosts else ""
