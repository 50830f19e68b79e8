"""A node takes a slot and the lease of a run, one exchange at a time, over a store in memory."""

from dataclasses import dataclass, field

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.elastic.nodes.connection import StoreConnection
from dlac_pipeline.elastic.nodes.election import Election
from dlac_pipeline.elastic.nodes.slots import NodeSlots
from dlac_pipeline.elastic.sealed_store import Sealed, SealedStore

TIMEOUT_S = 10.0
SECRET = "secret of all nodes"


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@dataclass
class Run:
    """A run whose nodes share a store and a clock."""

    store: HashStore = field(default_factory=HashStore)
    clock: Clock = field(default_factory=Clock)

    def connect(self, secret: str = SECRET) -> StoreConnection:
        """Return the connection of another node, without a thread."""
        return StoreConnection(SealedStore(self.store, secret, "dlac/r"), timeout_s=TIMEOUT_S, now=self.clock)

    def join(self, *, known: int = 0) -> tuple[NodeSlots, Election]:
        """Return another node that has taken a slot and written its record."""
        connection = self.connect()
        slots = NodeSlots(connection)
        slots.take(known)
        slots.write({})
        return slots, Election(connection, slots, ended_before=None)


@pytest.fixture
def run() -> Run:
    """A run without nodes."""
    return Run()


def lead(election: Election) -> Sealed:
    """Let a node take the lease, and return the lease that it has found."""
    found = election.read()
    assert election.may_lead(found)
    election.begin_leading(found)
    return found


def test_slot_of_two_nodes_is_given_up(run: Run) -> None:
    """After a stranger deletes the counter two nodes have the same slot. The later one gives it up, and takes the next one."""
    first, _ = run.join()
    run.store.delete_key("dlac/r/slots")
    second, _ = run.join()
    assert (first.own, second.own) == (1, 0)
    second.take(known=0)
    assert (first.own, second.own) == (1, 2)


def test_deleted_counter_is_restored(run: Run) -> None:
    """The last slot is counted again, so that the next node takes none that is in use."""
    run.join()
    second, _ = run.join()
    run.store.delete_key("dlac/r/slots")
    second.restore_counter()
    third, _ = run.join()
    assert third.own == 3


def test_first_record_is_no_heartbeat(run: Run) -> None:
    """The first record that is read may be of a dead node. A second one shows that the node lives."""
    leader, _ = run.join()
    other, _ = run.join()
    leader.read_peers(leader.count(0), all_of_them=True)
    assert leader.ids_of([1, 2]) == {1: leader.id, 2: other.id}
    assert leader.peers[2].record == {}
    other.write({"offer": {}})
    leader.read_peers(2, all_of_them=True)
    assert "offer" in leader.peers[2].record
    other.write({"gone": True})
    leader.read_peers(2, all_of_them=True)
    assert leader.has_left(2)


def test_silent_leader_is_replaced(run: Run) -> None:
    """A node takes the lease once its holder has renewed nothing for the time-out, or has given it back."""
    (_, leader), (slots, heir) = run.join(), run.join()
    lead(leader)
    assert not heir.may_lead(heir.read())
    run.clock.now += TIMEOUT_S + 1
    lead(heir)
    assert slots.peers[1].heard_at < run.clock.now - TIMEOUT_S
    leader.read()
    assert (leader.leads, heir.leads) == (False, True)
    heir.give_back()
    lead(leader)
    assert leader.leads


def test_one_of_two_nodes_leads(run: Run) -> None:
    """If two nodes take the lease that both have found, only the first to write it leads."""
    (_, first), (_, second) = run.join(), run.join()
    found = [first.read(), second.read()]
    first.begin_leading(found[0])
    second.begin_leading(found[1])
    assert (first.leads, second.leads) == (True, False)


def test_replayed_lease_changes_nothing(run: Run) -> None:
    """A lease that a stranger recorded and writes again does not set a node back."""
    _, leader = run.join()
    lead(leader)
    old = run.store.get("dlac/r/lease")
    leader.renew(leader.read(), {**leader.lease, "round": 7})
    run.store.set("dlac/r/lease", old.decode())
    leader.read()
    assert (leader.leads, leader.lease["round"]) == (True, 7)


def test_other_key_is_foreign(run: Run) -> None:
    """A node with another key cannot open the lease. It waits while that changes, and uses the store once it does not."""
    _, leader = run.join()
    lead(leader)
    connection = run.connect("another secret of nodes")
    election = Election(connection, NodeSlots(connection), ended_before=None)
    election.read()
    assert (election.is_foreign, election.others_meet) == (True, True)
    run.clock.now += TIMEOUT_S
    assert (election.is_foreign, election.others_meet) == (True, False)


def test_end_reaches_addressed_nodes(run: Run) -> None:
    """The end of the run is for the nodes that it names. An end that was announced before the launch is no news."""
    (_, leader), (slots, waits), (_, other) = run.join(), run.join(), run.join()
    lead(leader)
    waits.read(), other.read()
    leader.renew(
        leader.read(), {**leader.lease, "ended": {"id": "e", "message": {"ending": "stopped"}, "to": [slots.id]}}
    )
    for election in (waits, other):
        election.read()
    assert (waits.end, waits.known_end, other.end, other.known_end) == ({"ending": "stopped"}, "e", None, None)
    _, late = run.join()
    late.read()
    assert (late.end, late.known_end) == (None, "e")
