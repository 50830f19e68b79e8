"""Nodes meet, form rounds, lose each other and end runs, with a real store."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.elastic import membership
from dlac_pipeline.elastic.membership import EndedElsewhere, Membership
from dlac_pipeline.elastic.nodes.node_heartbeat import NodeHeartbeat
from dlac_pipeline.elastic.rank_assignment import Offer, RoundPlan, assign_ranks, usable_ranks
from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.extensions.torchrun.commands import serve_rendezvous
from dlac_pipeline.lakehouse.errors import NodesMissing, SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.spec.mesh_spec import MeshSpec
from tests.conftest import wait_until
from tests.launched_nodes import heartbeat, round_of, rounds, wait_for_spare
from tests.ports import own_port
from tests.small_records import small_spec

NEVER = threading.Event()


def offer(host: str, *, ranks: int = 1, attempt: int = 0, config: str = "") -> Offer:
    """Return the offer of a node of a test."""
    return Offer(host=host, address="127.0.0.1", ranks=ranks, attempt=attempt, config=config)


def launch(nodes: str, *, timeout_s: int = 60, **changes: Any) -> LaunchSpec:
    """Return settings of several nodes that gather quickly."""
    return LaunchSpec(
        script="x", nodes=nodes, rendezvous="127.0.0.1:1", node_timeout_s=timeout_s, last_call_s=1, **changes
    )


def job(port: int, **changes: Any) -> JobSpec:
    """Return a job of up to two nodes that meet at a port of this one."""
    settings = {"nodes": "1:2", "nproc_per_node": 1, "last_call_s": 1, "gather_timeout_s": 120, "node_timeout_s": 60}
    return small_spec(
        order={"batch_size": 4, "key_groups": 4, "steps": 1},
        launch={"rendezvous": f"127.0.0.1:{port}", **settings, **changes},
    )


@pytest.fixture
def store() -> TCPStore:
    """A store at a port of this node."""
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def start(store: TCPStore) -> Iterator[Callable[..., NodeHeartbeat]]:
    """Yield a function that starts another node's heartbeat at the store, and waits for its slot."""
    with ExitStack() as stack:

        def start_heartbeat(settings: LaunchSpec, *, batch_size: int = 4) -> NodeHeartbeat:
            beat = heartbeat(store.port, settings, batch_size=batch_size)
            stack.callback(beat.close, leaves=False)
            wait_until(lambda: beat.slot > 0, what="a slot")
            return beat

        yield start_heartbeat


def plan_of(beat: NodeHeartbeat) -> RoundPlan:
    """Wait until a node is a member of a round, and return its plan."""
    wait_until(lambda: beat.plan is not None, what="a round")
    plan = beat.plan
    assert plan is not None
    return plan


def meet(start: Callable[..., NodeHeartbeat], settings: LaunchSpec, count: int = 2) -> list[NodeHeartbeat]:
    """Let nodes form a round of a rank each, and return them with the leader first."""
    beats = [start(settings, batch_size=6) for _ in range(count)]
    for beat in beats:
        beat.seek(offer("a"))
    assert {plan_of(beat).world_size for beat in beats} == {count}
    return sorted(beats, key=lambda beat: beat.place or 0)


def is_refused(beat: NodeHeartbeat) -> bool:
    """Return whether a node knows which node would train another job."""
    return "found another one on b than on a" in beat.election.refused


def test_largest_dividing_world_size() -> None:
    """The number of ranks divides the batch. A node without a rank is no member. Nodes of the last round have priority."""
    offers = {1: offer("a", ranks=2), 2: offer("b", ranks=2), 3: offer("c", ranks=2)}
    ids = dict(enumerate("-abcd"))
    members = assign_ranks(offers, ids, leader=2, stay=[3], batch_size=4, most_nodes=3)
    assert [(member.slot, member.first_rank, member.ranks) for member in members] == [(2, 0, 2), (3, 2, 2)]
    uneven = assign_ranks(offers, ids, leader=1, stay=[], batch_size=3, most_nodes=3)
    assert [(member.slot, member.first_rank, member.ranks) for member in uneven] == [(1, 0, 2), (2, 2, 1)]
    shared = assign_ranks(offers, ids, leader=1, stay=[], batch_size=2, most_nodes=3, mesh=MeshSpec(pp=2))
    assert [(member.slot, member.first_rank, member.ranks) for member in shared] == [(1, 0, 2), (2, 2, 2)]
    assert [usable_ranks(4, available, MeshSpec(tp=4)) for available in (2, 7, 9, 20)] == [0, 4, 8, 16]
    assert usable_ranks(12, 12, MeshSpec(ep=4)) == 12
    assert usable_ranks(12, 11, MeshSpec(ep=4)) == 4
    odd = {1: offer("a", ranks=3), 2: offer("b", ranks=3)}
    split = assign_ranks(odd, ids, leader=1, stay=[], batch_size=8, most_nodes=2, mesh=MeshSpec(tp=2))
    assert [member.ranks for member in split] == [2, 2]
    assert not assign_ranks(odd, ids, leader=1, stay=[], batch_size=8, most_nodes=2, mesh=MeshSpec(tp=4))
    largest = assign_ranks({**offers, 4: offer("d", ranks=8)}, ids, leader=1, stay=[2], batch_size=24, most_nodes=3)
    assert [(member.slot, member.id) for member in largest] == [(1, "a"), (2, "b"), (4, "d")]
    plan = RoundPlan.form(members, number=3, port=5)
    assert RoundPlan.of(asdict(plan)) == plan
    hosts = [replace(plan.members[0], place=place, offer=offer(host)) for place, host in enumerate("aabbb")]
    assert [member.buddy for member in RoundPlan.form(tuple(hosts), number=3, port=5).members] == [2, 2, 0, 0, 0]
    assert [plan.share(place).node for place in range(2)] == [0, 1]
    assert RoundPlan.form(largest, number=3, port=5).part(2).share(2).nodes == 3
    assert (plan.place_of(3, "c"), plan.place_of(3, "b"), plan.place_of(1, "a")) == (1, None, None)


def test_messages_reach_leader_and_back() -> None:
    """The leader reads every node's message. Every node reads the leader's and what it announces."""
    with rounds(3) as (leader, first, second):
        first.publish({"step": 1})
        second.publish({"step": 2})
        wait_until(lambda: leader.message_of(2).get("step") == 2, what="the second node's message")
        wait_until(lambda: leader.message_of(1).get("step") == 1, what="the first node's message")
        leader.publish({"asks": True})
        leader.announce("resume", {"step": 7})
        for node in (first, second):
            wait_until(lambda: node.announced("resume") == {"step": 7}, what="the announcement")  # noqa: B023 - called here
            wait_until(lambda: bool(node.message_of(0).get("asks")), what="the leader's message")  # noqa: B023 - called here
        leader.announce("resume", {"step": 8})
        wait_until(lambda: first.announced("resume") == {"step": 8}, what="the later announcement")
        assert not any(node.lost_nodes() or node.cut_off for node in (leader, first, second))


def test_next_round_forgets_messages(start: Callable[..., NodeHeartbeat]) -> None:
    """Messages and announcements belong to their round."""
    first, second = meet(start, launch("2"))
    (number,) = {plan_of(beat).number for beat in (first, second)}
    first.leadership.announce("resume", {"step": 1})
    second.publish({"step": 1})
    wait_until(lambda: second.round.announcements.get("resume") is not None, what="the announcement")
    wait_until(lambda: first.round.message_of(second.slot).get("step") == 1, what="the message")
    for beat in (first, second):
        beat.round.end()
        beat.seek(offer("a", attempt=1))
    (later,) = {plan_of(beat).number for beat in (first, second)}
    assert later > number
    assert second.round.announcements.get("resume") is None
    assert "step" not in first.round.message_of(second.slot)


def test_survivor_leads_next_round(start: Callable[..., NodeHeartbeat]) -> None:
    """A leader whose heartbeat stops is lost, and the survivor forms a round without it."""
    lost = start(launch("1:2", timeout_s=3))
    lost.seek(offer("a"))
    wait_until(lambda: lost.leads, what="the lease")
    survivor = start(launch("1:2", timeout_s=3))
    survivor.seek(offer("b"))
    assert plan_of(survivor).nodes == 2
    lost.close(leaves=False)
    wait_until(lambda: survivor.round.is_lost(lost.slot), what="the loss")
    survivor.round.end()
    survivor.seek(offer("b", attempt=1))
    assert ([member.slot for member in plan_of(survivor).members], survivor.leads) == ([survivor.slot], True)


def test_members_read_own_part(start: Callable[..., NodeHeartbeat], store: TCPStore) -> None:
    """A follower knows the leader, itself and the next node. A new leader waits for all members of the last round."""
    settings = launch("1:3", timeout_s=3600)
    leader, rest, heir = meet(start, settings, 3)
    for led, known in ((rest, [leader, rest, heir]), (heir, [leader, heir])):
        plan = plan_of(led)
        assert [member.slot for member in plan.members] == [beat.slot for beat in known]
        assert (plan.nodes, plan.world_size, plan.share(plan.members[1].place).ranks) == (3, 3, 1)
    assert plan_of(leader).is_whole
    leader.close(leaves=True)
    wait_until(lambda: heir.round.is_lost(leader.slot), what="the leader's departure")
    heir.round.end()
    heir.seek(offer("a", attempt=1))
    wait_until(lambda: heir.leads, what="the lease")
    time.sleep(2 * settings.last_call_s)
    assert heir.plan is None, "a member that still ends its ranks is waited for"
    rest.round.end()
    rest.seek(offer("a", attempt=1))
    assert plan_of(heir).nodes == 2


def test_departure_needs_no_timeout(start: Callable[..., NodeHeartbeat]) -> None:
    """A leader that exits gives its lease back, and the loss of a node that exits is known at once."""
    leader, *rest = meet(start, launch("1:3", timeout_s=3600), 3)
    rest[0].close(leaves=True)
    wait_until(lambda: leader.round.is_lost(rest[0].slot), what="the departure")
    leader.close(leaves=True)
    wait_until(lambda: rest[1].round.is_lost(leader.slot), what="the leader's departure")
    rest[1].round.end()
    rest[1].seek(offer("a", attempt=1))
    assert plan_of(rest[1]).nodes == 1


def test_node_of_latest_attempt_leads(start: Callable[..., NodeHeartbeat]) -> None:
    """A new node with the lease hands it over to the node of the latest attempt."""
    newcomer, veteran = start(launch("2")), start(launch("2"))
    newcomer.seek(offer("new"))
    wait_until(lambda: newcomer.leads, what="the lease")
    veteran.seek(offer("old", attempt=4))
    assert [member.offer.host for member in plan_of(newcomer).members] == ["old", "new"]
    assert veteran.leads


@pytest.mark.slow
def test_spare_is_admitted_later(start: Callable[..., NodeHeartbeat]) -> None:
    """A node beyond the maximum number waits while its peers train, and replaces a lost one."""
    settings = launch("2", timeout_s=3)
    leader, other = meet(start, settings)
    spare = start(settings)
    spare.seek(offer("spare"))
    wait_until(lambda: spare.others_train, what="the others' round")
    assert not leader.leadership.could_grow
    other.close(leaves=False)
    wait_until(lambda: leader.round.is_lost(other.slot), what="the loss")
    leader.round.end()
    leader.seek(offer("a", attempt=1))
    assert [member.offer.host for member in plan_of(spare).members] == ["a", "spare"]


def test_spare_takes_place_in_the_round(start: Callable[..., NodeHeartbeat]) -> None:
    """A lost node's place goes to a spare, within the round. The lost node lives, and finds that it has none."""
    settings = launch("2")
    leader, other = meet(start, settings)
    leading, lost = round_of(leader), round_of(other)
    assert not leading.fill_place(1)
    spare = start(settings)
    spare.seek(offer("spare"))
    wait_until(lambda: leading.fill_place(1), what="a spare")
    plan = plan_of(spare)
    assert (spare.place, plan.number, plan.share(1).is_late) == (1, leading.number, True)
    wait_until(lambda: lost.cut_off, what="the news at the lost node")
    round_of(spare).publish({"says": "here"})
    wait_until(lambda: leading.message_of(1).get("says") == "here", what="the spare's message")
    assert not leading.lost_nodes()
    other.seek(offer("b"))
    spare.close(leaves=True)
    wait_until(lambda: 1 in leading.lost_nodes(), what="the spare's departure")
    wait_until(lambda: leading.fill_place(1), what="the node that had the place before")


def test_other_job_is_refused(start: Callable[..., NodeHeartbeat]) -> None:
    """All nodes learn which nodes would train another job."""
    beats = [start(launch("2")) for _ in range(2)]
    beats[0].seek(offer("a", config="x"))
    wait_until(lambda: beats[0].leads, what="the lease")
    beats[1].seek(offer("b", config="y"))
    for beat in beats:
        wait_until(partial(is_refused, beat), what="the refusal")
        assert beat.plan is None
    beats[0].close(leaves=True)
    time.sleep(1.0)
    assert is_refused(beats[1])  # which did not take the lease that was given back


@pytest.mark.slow
def test_late_node_of_other_job_is_refused(start: Callable[..., NodeHeartbeat]) -> None:
    """A node that joins late with another job is refused, and does not end the round that trains."""
    leader = start(launch("1:2"))
    leader.seek(offer("a", config="x"))
    plan_of(leader)
    late = start(launch("1:2"))
    late.seek(offer("b", config="y"))
    wait_until(partial(is_refused, late), what="the refusal")
    assert not leader.election.refused
    assert not leader.leadership.could_grow


@pytest.mark.slow
def test_offer_of_dead_node_is_ignored(start: Callable[..., NodeHeartbeat]) -> None:
    """The offer of a node that died while it waited neither joins the next round nor refuses another job."""
    dead = start(launch("2", timeout_s=3))
    dead.seek(offer("dead", config="x"))
    wait_until(lambda: dead.leads, what="the lease")
    waits = start(launch("2", timeout_s=3))
    waits.seek(offer("dead, too", config="y"))
    for beat in (dead, waits):
        beat.close(leaves=False)
    alive = start(launch("1:2", timeout_s=3))
    alive.seek(offer("alive", config="z"))
    refused: list[str] = []

    def has_round() -> bool:
        refused.append(alive.election.refused)
        return alive.plan is not None

    wait_until(has_round, what="a round")
    assert [member.offer.host for member in plan_of(alive).members] == ["alive"]
    assert not any(refused)


def test_newcomer_makes_room_to_grow(start: Callable[..., NodeHeartbeat]) -> None:
    """A leader knows that with the waiting node the run would have more ranks. The members of its round are none."""
    leader, _ = meet(start, launch("1:3"))
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        assert not leader.leadership.could_grow
    start(launch("1:3"), batch_size=6).seek(offer("b"))
    wait_until(lambda: leader.leadership.could_grow, what="the newcomer")


@pytest.mark.slow
def test_lost_store_cuts_nodes_off() -> None:
    """A node without its store knows that it is cut off, although its main thread waits."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    beat = heartbeat(store.port, launch("1:2", timeout_s=3))
    beat.seek(offer("a"))
    plan_of(beat)
    del store
    wait_until(lambda: beat.round.cut_off, what="the silence")
    beat.close(leaves=False)


@pytest.mark.slow
def test_excluded_node_is_cut_off(start: Callable[..., NodeHeartbeat]) -> None:
    """A node that is not in its peers' new round stops training."""
    leader, other = meet(start, launch("1:2", timeout_s=3))
    round_ = round_of(other)
    with other.connection.lock:  # stops its thread, as in a suspended process
        wait_until(lambda: leader.round.is_lost(other.slot), what="the loss")
        leader.round.end()
        leader.seek(offer("a", attempt=1))
        assert plan_of(leader).nodes == 1
    wait_until(lambda: round_.cut_off, what="the others' round")


def next_round(node: Membership, attempt: int = 0) -> Any:
    """Return the node's next round, and leave when the run has ended."""
    return node.next_round(attempt, NEVER, lambda: None)


def test_spare_learns_of_the_end() -> None:
    """The node that serves the store exits last: the waiting nodes have read how the run ended."""
    spec = job(own_port(), nodes="2", node_timeout_s=5)
    serves, other, spare = (Membership.of_job(spec, ledger="l") for _ in range(3))
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(next_round, serves)
        wait_until(lambda: serves._endpoint is not None and serves._endpoint.serves, what="the store")
        assert next_round(other) is not None
        leader = serves if joined.result().leads else other
        waits = pool.submit(next_round, spare)
        wait_for_spare(spec, "l")
        leader.end_run({"ending": "stopped"})
        other.close()
        serves.close()
        with pytest.raises(EndedElsewhere) as ended:
            waits.result()
    spare.close()
    assert ended.value.message["ending"] == "stopped"


@contextmanager
def serving(port: int) -> Iterator[None]:
    """Serve a rendezvous at a port of this node."""
    ready, ends = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve_rendezvous, f"127.0.0.1:{port}", ends, ready.set)
        try:
            assert ready.wait(300)
            yield
        finally:
            ends.set()
        served.result()


def test_cut_off_node_learns_of_the_end() -> None:
    """The end of an earlier launch is ignored. The end that a node reads when it rejoins is not."""
    port = own_port()
    spec = job(port)
    with serving(port), ThreadPoolExecutor(1) as pool:
        before = Membership.of_job(spec, ledger="l")
        assert next_round(before).leads
        before.end_run({"ending": "finished"})
        before.close()
        with (
            closing(Membership.of_job(spec, ledger="l")) as other,
            closing(Membership.of_job(spec, ledger="l")) as cut_off,
        ):
            joined = pool.submit(next_round, other)
            wait_until(lambda: other._heartbeat is not None and other._heartbeat.leads, what="the lease")
            assert not next_round(cut_off).leads
            cut_off.forget()
            joined.result()
            other.end_run({"ending": "stopped"})
            with pytest.raises(EndedElsewhere) as ended:
                next_round(cut_off)
    assert ended.value.message["ending"] == "stopped"


@pytest.mark.slow
def test_nodes_move_to_next_rendezvous() -> None:
    """If the first rendezvous is lost, its nodes meet at the second. Nodes that find the first again wait for them there."""
    ports = (own_port(), own_port())
    spec = job(1, nodes="2:3", rendezvous=",".join(f"127.0.0.1:{port}" for port in ports), node_timeout_s=3)
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        first, second, *late = (stack.enter_context(closing(Membership.of_job(spec, ledger="l"))) for _ in range(4))
        stack.enter_context(serving(ports[1]))
        with serving(ports[0]):
            before = [each.result() for each in [pool.submit(next_round, node) for node in (first, second)]]
        after = [each.result() for each in [pool.submit(next_round, node) for node in (first, second)]]
        assert [sorted(each.share.first_rank for each in found) for found in (before, after)] == [[0, 1], [0, 1]]
        with serving(ports[0]):
            stop = threading.Event()
            joins = [pool.submit(node.next_round, 0, stop, lambda: None) for node in late]
            wait_until(
                lambda: all(node._heartbeat is not None and node._heartbeat.others_train for node in late),
                what="the others",
            )
            stop.set()
            assert [each.result() for each in joins] == [None, None]


def test_nodes_meet_at_first_rendezvous() -> None:
    """A node that waits at the second address moves to the first when that is served."""
    ports = (own_port(), own_port())
    spec = job(1, nodes="2", rendezvous=",".join(f"127.0.0.1:{port}" for port in ports), node_timeout_s=3)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        early, late = (stack.enter_context(closing(Membership.of_job(spec, ledger="l"))) for _ in range(2))
        stack.enter_context(serving(ports[1]))
        joins = pool.submit(next_round, early)
        wait_until(lambda: early._heartbeat is not None and early._heartbeat.leads, what="the lease")
        stack.enter_context(serving(ports[0]))
        assert {joins.result().leads for joins in (pool.submit(next_round, late), joins)} == {True, False}


@pytest.mark.parametrize(
    ("addresses", "found"), [("a:1,b:2", "above half of 2"), ("a:1,,b:2", "found 'a:1,,b:2'"), ("a,b:2", "host:port")]
)
def test_unusable_addresses_are_refused(addresses: str, found: str) -> None:
    """Each of several addresses has a port, and the nodes that train are more than half, or others could train at once."""
    with pytest.raises(ValueError, match=found):
        launch("1:2").model_validate({"script": "x", "nodes": "1:2", "rendezvous": addresses})


@pytest.mark.parametrize(
    ("rendezvous", "found"),
    [("127.0.0.1:", r"found only 1.*give an IP address"), ("192.0.2.1:29400", r"192\.0\.2\.1:29400")],
)
def test_missing_nodes_are_reported(rendezvous: str, found: str) -> None:
    """Too few nodes in time are an error with their number, a silent address, or the setting of a name that is this node's."""
    address = f"{rendezvous}{own_port()}" if rendezvous.endswith(":") else rendezvous
    spec = job(1, nodes="2", gather_timeout_s=2, rendezvous=address, node_timeout_s=3)
    with closing(Membership.of_job(spec, ledger="l")) as node, pytest.raises(NodesMissing, match=found):
        next_round(node)


def test_stop_ends_the_wait() -> None:
    """A node that is stopped while it waits has no round."""
    stop = threading.Event()
    with closing(Membership.of_job(job(own_port(), nodes="2"), ledger="l")) as node, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(node.next_round, 0, stop, lambda: None)
        time.sleep(0.5)
        stop.set()
        assert waits.result(30) is None


@pytest.mark.parametrize("secret", ["", "short"])
def test_several_nodes_need_a_key(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """A run of several nodes without a secret, or with a short one, does not start."""
    monkeypatch.setenv(KEY_VARIABLE, secret)
    with pytest.raises(SpecInvalid, match="openssl rand -hex 32"):
        Membership.of_job(job(1), ledger="l")
    membership.Membership.of_job(job(1, nodes="", rendezvous=""), ledger="l").close()


def test_key_file_is_read_once(tmp_path: Path) -> None:
    """It can be a pipe. The node's memory is served with the same secret."""
    key, served = tmp_path / "key", []
    os.mkfifo(key)

    def serve(address: str, secret: str) -> int:
        served.append(secret)
        return 1

    spec = job(own_port(), rendezvous_key_file=str(key))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(key.write_text, "a secret of two nodes\n")
        node = Membership.of_job(spec, ledger="l", serve_memory=serve)
    with closing(node):
        assert next_round(node).leads
    assert served == ["a secret of two nodes"]
