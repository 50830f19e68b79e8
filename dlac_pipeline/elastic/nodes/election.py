"""Election of the node that leads a run: the lease in the store, which the leader renews and a waiting node takes over."""

from dlac_pipeline.elastic.nodes.connection import StoreConnection
from dlac_pipeline.elastic.nodes.slots import NodeSlots, Peer, later_number
from dlac_pipeline.elastic.sealed_store import Message, Sealed

_NAME = "lease"
_NO_LEASE: Message = {
    "slot": 0,
    "id": "",
    "slots": 0,
    "beat": 0,
    "round": 0,
    "version": 0,
    "formed_by": 0,
    "announced": {},
    "message": {},
    "training": False,
    "ended": None,
}
_NEWS = ("slot", "round", "announced", "message", "training", "ended")
"""Parts of the lease whose change is news to the nodes that do not lead."""


class Election:
    """The lease as this node has read it: the leader, its round, its message to all, and the end of the run."""

    def __init__(self, connection: StoreConnection, slots: NodeSlots, *, ended_before: str | None) -> None:
        """`ended_before`: end of a run that an earlier launch announced. None: the one found first."""
        self.ended_before = ended_before
        self.lease: Message = _NO_LEASE
        self.renewed_at = connection.now()
        """Time at which this node has read something new from the leader."""
        self._connection = connection
        self._slots = slots
        self._raw, self._raw_at = b"", self.renewed_at

    @property
    def leads(self) -> bool:
        """True if this node has the lease."""
        own = self._slots.own
        return bool(own) and (self.lease["slot"], self.lease["id"]) == (own, self._slots.id)

    @property
    def is_foreign(self) -> bool:
        """True if the lease has content that this node's key does not open."""
        with self._connection.lock:
            return self.lease is _NO_LEASE and bool(self._raw)

    @property
    def others_meet(self) -> bool:
        """True if nodes with another key use the same store now: this node would only overwrite their records."""
        with self._connection.lock:
            return self.is_foreign and self._raw_at > self._connection.now() - self._connection.timeout_s

    @property
    def has_live_round(self) -> bool:
        """True if a live leader has a round that trains."""
        with self._connection.lock:
            fresh = self._connection.now() - self.renewed_at < self._connection.timeout_s
            return bool(fresh and self.lease["round"] > 0 and self.lease["training"])

    @property
    def refused(self) -> str:
        """Reason why the leader forms no round with this node. Empty: it would."""
        with self._connection.lock:
            hosts = self.lease.get("refused", {})
            return str(hosts["why"]) if self._slots.id in hosts.get("ids", ()) else ""

    @property
    def nodes_ready(self) -> int:
        """Number of nodes that wait for a round, this one included, as far as it knows."""
        with self._connection.lock:
            return max(1, int(self.lease.get("ready", 0)))

    @property
    def end(self) -> Message | None:
        """The end of the run since this node joined."""
        with self._connection.lock:
            found = self.lease["ended"]
            news = found is not None and found["id"] != self.ended_before and self._is_addressed(found)
            return found["message"] if news else None

    @property
    def known_end(self) -> str | None:
        """Id of the end that this node has read, in this launch or an earlier one."""
        with self._connection.lock:
            found = self.lease["ended"]
            known = found is not None and (found["id"] == self.ended_before or self._is_addressed(found))
            return found["id"] if known else None

    def read(self) -> Sealed:
        """Read the lease."""
        found = self._connection.store.read(_NAME)
        self._observe(found)
        return found

    def may_lead(self, found: Sealed) -> bool:
        """Return whether a node that waits takes the lease: it is free, or its holder is silent or has left."""
        with self._connection.lock:
            if self.refused:  # as the leader it would refuse no other job
                return False
            heard_at = self._raw_at if self.lease is _NO_LEASE else self.renewed_at
            is_new = not found.raw and self.lease is _NO_LEASE
            was_returned = bool(self.lease["beat"]) and not self.lease["slot"]
            return is_new or self._connection.has_passed(heard_at) or was_returned

    def begin_leading(self, found: Sealed) -> None:
        """Take the lease. The node that led, and was silent, is lost already."""
        with self._connection.lock:
            before, id_before, silent_since = self.lease["slot"], self.lease["id"], self.renewed_at
        mine = {"slot": self._slots.own, "id": self._slots.id, "training": False, "refused": {}, "message": {}}
        self.renew(found, {**self.lease, **mine})
        with self._connection.lock:
            if self.leads and before:
                self._slots.peers[before] = Peer(id=id_before, heard_at=silent_since)
        self._connection.hurry()

    def renew(self, found: Sealed, lease: Message) -> None:
        """Write the lease if `found` is still stored."""
        renewed = {**lease, "beat": later_number(self.lease["beat"])}
        self._observe(self._connection.store.replace(_NAME, found, renewed))

    def give_back(self) -> None:
        """Return the lease, if this node has it."""
        lease = self._connection.store.read(_NAME)
        if lease.message is not None and lease.message["slot"] == self._slots.own:
            self._connection.store.replace(_NAME, lease, {**lease.message, "slot": 0, "training": False})

    def _is_addressed(self, ended: Message) -> bool:
        return not self._slots.ids.isdisjoint(ended["to"])

    def _observe(self, found: Sealed) -> None:
        with self._connection.lock:
            if found.raw == self._raw:
                return
            self._raw, self._raw_at = found.raw, self._connection.now()
            if found.message is None or found.message["beat"] < self.lease["beat"]:
                return  # a stranger's, or an old one that a stranger wrote again
            if any(found.message.get(name) != self.lease.get(name) for name in _NEWS):
                self._connection.report_news()
            self.lease, self.renewed_at = found.message, self._connection.now()
            if self.ended_before is None:
                ended = self.lease["ended"]
                self.ended_before = "" if ended is None else str(ended["id"])
