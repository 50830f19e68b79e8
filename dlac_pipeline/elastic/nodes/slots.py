"""Slots of the nodes of a run: each connection of a node takes the next one, and writes its record there."""

import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dlac_pipeline.elastic.nodes.connection import StoreConnection
from dlac_pipeline.elastic.sealed_store import Message, Sealed

_COUNTER = "slots"
_TRIES = 16
"""Attempts at a slot in one exchange: all nodes of a run may start at once."""
_FORGET = 20
"""Time-outs of silence after which a node is read only now and then."""


@dataclass(slots=True)
class Peer:
    """Another node, as the leader has read it."""

    record: Message = field(default_factory=dict)
    id: str = ""
    beat: int = -1
    """Last heartbeat that was read. -1: none yet. The first one may be of a node that died long ago, and does not count."""
    heard_at: float = 0.0
    entered: int = 0
    """Last round that it took part in."""


class NodeSlots:
    """This node's slot with its record, and the other nodes' records as the leader reads them."""

    def __init__(self, connection: StoreConnection, *, ids_before: Collection[str] = ()) -> None:
        self.id = secrets.token_hex(8)
        self.ids = frozenset({self.id, *ids_before})
        """Ids of this node's connections, past ones included."""
        self.own = 0
        """This node's number, or 0 before it has one."""
        self.peers: dict[int, Peer] = {}
        self._connection = connection
        self._store = connection.store
        self._beat = 0
        self._wrote_at = 0
        """Beat of this node's last record in its slot: another node's record there with an earlier one is an old one."""
        self._stored = Sealed()
        """This node's record as it is stored."""

    def take(self, known: int) -> None:
        """Take the next slot. `known`: the last one as the lease has it."""
        found = self._store.read(_COUNTER)
        for _ in range(_TRIES):
            slot = self._last(known, found) + 1
            wanted = {"last": slot, "by": self.id}
            found = self._store.replace(_COUNTER, found, wanted)
            if found.message == wanted:
                self.own, self._wrote_at = slot, later_number(0) - int(1000 * self._connection.timeout_s)
                return

    def restore_counter(self) -> None:
        """Count this node's slot again, because a stranger may have deleted the last slot."""
        found = self._store.read(_COUNTER)
        if found.message is None or found.message["last"] < self.own:
            self._store.replace(_COUNTER, found, {"last": self.own, "by": self.id})

    def write(self, content: Message) -> None:
        """Write this node's record. Give up a slot that two nodes hold, after a stranger deleted the last slot."""
        self._beat = later_number(self._beat)
        record = {"id": self.id, "beat": self._beat, **content}
        for _ in range(2):
            found = self._stored = self._store.replace(f"node/{self.own}", self._stored, record)
            other = found.message
            if other is not None and (other["id"], other["beat"]) == (self.id, self._beat):
                self._wrote_at = self._beat
                return
            if other is not None and other["id"] != self.id and other["beat"] >= self._wrote_at:
                with self._connection.lock:
                    self.own, self._stored = 0, Sealed()
                return

    def count(self, known: int) -> int:
        """Return the last slot of all nodes. `known`: the last one as the lease has it."""
        return self._last(known, self._store.read(_COUNTER))

    def read_peers(self, last: int, *, all_of_them: bool) -> None:
        """Read the other nodes' records, as the leader. Nodes that were silent for long are read with `all_of_them`."""
        with self._connection.lock:
            now, forgotten_s = self._connection.now(), _FORGET * self._connection.timeout_s
            for slot in range(1, last + 1):
                self.peers.setdefault(slot, Peer(heard_at=now))
            present = [slot for slot in self.peers if slot != self.own and not self.has_left(slot)]
            read = [slot for slot in present if all_of_them or now - self.peers[slot].heard_at < forgotten_s]
            wrote = [slot for slot in read if self.peers[slot].beat >= 0]
            silent = [slot for slot in read if self.peers[slot].beat < 0]
        found = zip(wrote, self._store.read_all([f"node/{slot}" for slot in wrote]), strict=True)
        new = ((slot, self._store.read(f"node/{slot}")) for slot in silent)
        for slot, sealed in (*found, *new):
            self._observe(slot, sealed.message)

    def has_left(self, slot: int) -> bool:
        """Return True if another node has reported that it exits."""
        return bool(slot in self.peers and self.peers[slot].record.get("gone"))

    def ids_of(self, slots: Iterable[int]) -> dict[int, str]:
        """Return the id of the node in each slot."""
        return {slot: self.id if slot == self.own else self.peers[slot].id for slot in slots}

    def _observe(self, slot: int, record: Message | None) -> None:
        with self._connection.lock:
            peer = self.peers[slot]
            if record is None or record["beat"] <= peer.beat:
                return
            is_first, peer.beat, peer.id = peer.beat < 0, record["beat"], record["id"]
            if not is_first or "gone" in record:
                peer.record, peer.heard_at = record, self._connection.now()
                peer.entered = record.get("round", peer.entered)

    def _last(self, known: int, found: Sealed) -> int:
        """Return the last slot. A stranger may have deleted its record, or written an old one again."""
        return max(self.own, known, 0 if found.message is None else int(found.message["last"]))


def later_number(number: int) -> int:
    """Return a greater number, at least the milliseconds since 1970."""
    return max(number + 1, time.time_ns() // 10**6)
