"""Stores of this node listen at their configured address only."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.elastic.endpoint import Endpoint
from dlac_pipeline.elastic.nodes.node_heartbeat import NodeHeartbeat
from dlac_pipeline.elastic.rank_assignment import Offer
from dlac_pipeline.elastic.ranks import addresses, process_group
from dlac_pipeline.elastic.ranks.addresses import listen_at, own_address, stands_for_loopback
from dlac_pipeline.elastic.sealed_store import SealedStore
from dlac_pipeline.extensions.torchrun.commands import serve_rendezvous
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.launch_spec import LaunchSpec
from tests.conftest import wait_until
from tests.launched_nodes import SECRET, heartbeat, round_of
from tests.ports import own_port

NEVER = threading.Event()
OTHER_LOOPBACK = "127.0.0.2"


class Strike:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self._path),))


def answers(host: str, port: int) -> bool:
    """Return whether the address accepts a second connection."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_served_rendezvous_listens_there_only() -> None:
    """`dlac rendezvous`, and a node that serves the rendezvous of its run, accept connections at their address alone."""
    port, ready, ends = own_port(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve_rendezvous, f"127.0.0.1:{port}", ends, ready.set)
        try:
            assert ready.wait(60)
            assert (answers("127.0.0.1", port), answers(OTHER_LOOPBACK, port)) == (True, False)
        finally:
            ends.set()
        serving.result()
    port = own_port()
    store = Endpoint(f"127.0.0.1:{port}", timeout_s=60).connect()
    assert (answers("127.0.0.1", port), answers(OTHER_LOOPBACK, port), store.port) == (True, False, port)


def test_silent_server_is_passed_over() -> None:
    """Nodes meet at the second address if the first one accepts connections and does not answer."""
    served = process_group.serve_store("127.0.0.1", own_port())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{served.port}", timeout_s=1)
        assert endpoint.connect().port == served.port
        assert endpoint.find_better(lambda store: True) is None
    wait_until(lambda: "rendezvous" not in {each.name for each in threading.enumerate()}, what="the end of the calls")


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no.such.node.invalid:1", ":80", "127.0.0.1", "127.0.0.1:x"])
def test_unusable_rendezvous_is_refused(address: str) -> None:
    """The error names an address at which this node cannot listen."""
    with pytest.raises(SpecInvalid, match="host:port"):
        serve_rendezvous(address, NEVER, lambda: None)


def test_group_store_listens_at_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's store of the process group, which a script makes itself, is the store that DLAC has opened."""
    port = own_port()
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "SERVED_STORES", [])
    process_group.serve_group_store()
    dist.init_process_group("gloo")
    try:
        assert (answers("127.0.0.1", port), answers(OTHER_LOOPBACK, port)) == (True, False)
    finally:
        dist.destroy_process_group()


def test_stranger_writes_are_ignored(tmp_path: Path) -> None:
    """Two nodes meet although a stranger without the key writes, overwrites and deletes. None of its pickles is loaded."""
    server = process_group.serve_store("127.0.0.1", own_port())
    stranger = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    strike = pickle.dumps(Strike(tmp_path / "struck")).decode("latin-1")
    launch = LaunchSpec(script="x", nodes="2", rendezvous=f"127.0.0.1:{server.port}", last_call_s=1, node_timeout_s=60)
    beats = [heartbeat(server.port, launch) for _ in range(2)]
    for place, beat in enumerate(beats):
        beat.seek(Offer(host=f"host-{place}", address="127.0.0.1", ranks=1))

    def have_met() -> bool:
        names = {f"dlac/r/{name}" for name in ("lease", "slots", "node/1", "node/2", "member/1", "member/2")}
        for name in {*stranger.list_keys(), *names}:
            stranger.set(name, strike)
            stranger.delete_key(name)
        time.sleep(1.5)  # a flood would keep the nodes apart
        return all(beat.plan is not None for beat in beats)

    stranger.set("dlac/r/lease", strike)
    wait_until(have_met, what="the round")
    leader, other = sorted((round_of(beat) for beat in beats), key=lambda each: each.share.node)
    leader.announce("resume", {"step": 7})
    stranger.set("dlac/r/lease", strike)
    wait_until(lambda: other.announced("resume") == {"step": 7}, what="the announcement")
    names = stranger.list_keys()
    assert any("/round/" in name for name in names)
    assert not any("host-" in str(stranger.get(name)) for name in names)
    for beat in beats:
        beat.close(leaves=True)
    assert not (tmp_path / "struck").exists()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the round", pytest.param("in the round", marks=pytest.mark.soak)])
def test_earlier_store_is_no_news(when: str) -> None:
    """A stranger replays messages of nodes from an earlier store with the same key. They change nothing."""
    written: dict[str, list[bytes]] = {}
    earlier = process_group.serve_store("127.0.0.1", own_port())
    with meet(earlier.port) as (leader, follower):
        leader.leadership.announce("resume", {"step": 7})
        wait_until(lambda: follower.round.announcements.get("resume") is not None, what="the announcement")
        for _ in range(6):
            _note(earlier, written)
            time.sleep(0.5)
        leader.leadership.end_run({"ending": "stopped"})
        time.sleep(1.0)
        _note(earlier, written)
    later = process_group.serve_store("127.0.0.1", own_port())
    stranger = TCPStore("127.0.0.1", later.port, is_master=False, wait_for_workers=False)
    pieces = count()

    def replay() -> None:
        piece = next(pieces)
        for name, values in written.items():
            stranger.set(name, values[min(piece, len(values) - 1)].decode())

    with meet(later.port, on_tick=replay if when == "before the round" else lambda: None) as (leader, follower):
        rounds_ = [round_of(beat) for beat in (leader, follower)]
        for _ in range(8):  # for longer than `node_timeout_s`
            replay()
            time.sleep(0.5)
            assert [(beat.round.cut_off, beat.election.end, beat.election.refused) for beat in (leader, follower)] == [
                (False, None, "")
            ] * 2
            assert [round_.lost_nodes() for round_ in rounds_] == [[], []]
        leader.leadership.announce("resume", {"step": 9})
        wait_until(lambda: follower.round.announcements.get("resume") == {"step": 9}, what="the announcement")
        assert [beat.leads for beat in (leader, follower)] == [True, False]


def _note(store: TCPStore, written: dict[str, list[bytes]]) -> None:
    """Add the values of all keys to the recorded ones."""
    for name in store.list_keys():
        written.setdefault(name, []).append(store.get(name))


@contextmanager
def meet(port: int, *, on_tick: Callable[[], None] = lambda: None) -> Iterator[list[NodeHeartbeat]]:
    """Yield two nodes in one round, the leader first. `on_tick` is called twice a second until they meet."""
    launch = LaunchSpec(script="x", nodes="2", rendezvous=f"127.0.0.1:{port}", last_call_s=1, node_timeout_s=3)
    beats = [heartbeat(port, launch) for _ in range(2)]
    for place, beat in enumerate(beats):
        beat.seek(Offer(host=f"host-{place}", address="127.0.0.1", ranks=1))

    def have_met() -> bool:
        on_tick()
        time.sleep(0.5)
        assert [beat.election.end for beat in beats] == [None, None]
        return all(beat.place is not None for beat in beats)

    wait_until(have_met, what="the round")
    yield sorted(beats, key=lambda each: each.place or 0)
    for beat in beats:
        beat.close(leaves=True)


def test_other_key_disturbs_no_node() -> None:
    """A node with another key takes no slot while others meet, so that it overwrites no record. It knows why it waits."""
    server = process_group.serve_store("127.0.0.1", own_port())
    launch = LaunchSpec(script="x", nodes="1:2", rendezvous="127.0.0.1:1", last_call_s=1, node_timeout_s=60)
    beat = heartbeat(server.port, launch)
    beat.seek(Offer(host="a", address="127.0.0.1", ranks=1))
    wait_until(lambda: beat.place is not None, what="the round")
    other = heartbeat(server.port, launch, secret="another secret of nodes")
    other.seek(Offer(host="b", address="127.0.0.1", ranks=1))
    wait_until(lambda: other.election.is_foreign, what="the foreign lease")
    time.sleep(1.5)
    assert (other.slot, other.plan, beat.leads, beat.round.cut_off) == (0, None, True, False)
    for each in (beat, other):
        each.close(leaves=True)


def test_message_belongs_to_its_name() -> None:
    """A sealed message cannot be opened under another name or with another key."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ours, theirs = (SealedStore(store, secret, "dlac/r") for secret in (SECRET, "another secret of nodes"))
    ours.publish("a", {"step": 1})
    raw = ours.read("a").raw
    store.set("dlac/r/b", raw.decode())
    assert (ours.read("a").message, ours.read("b").message, theirs.read("a").message) == ({"step": 1}, None, None)
    assert b"step" not in raw
    assert (ours.read("c").raw, ours.read("b").raw) == (b"", raw)
    store.set("dlac/r/d", b"\xff\xfe")  # type: ignore[arg-type]  # bytes as well
    assert ours.replace("d", ours.read("d"), {"step": 2}).message == {"step": 2}
    assert ours.replace("d", ours.read("a"), {"step": 3}).message == {"step": 2}
    assert [each.message for each in ours.read_all(["a", "d", "e"])] == [{"step": 1}, {"step": 2}, None]


def test_deleted_message_is_written_again() -> None:
    """A stranger deletes a message: no reader waits for it or finds it, and its writer's next message takes its place."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ours = SealedStore(store, SECRET, "dlac/r")
    for name in ("a", "b"):
        ours.publish(name, {"step": 1})
    ours.read_all(["a", "b"])
    found = ours.read("a")
    store.delete_key("dlac/r/a")
    assert (ours.read("a").raw, ours.read("a").message) == (b"", None)
    assert [each.message for each in ours.read_all(["a", "b"])] == [None, {"step": 1}]
    assert ours.replace("a", found, {"step": 2}).message == {"step": 2}
    assert ours.read("a").message == {"step": 2}


def test_hidden_name_stands_for_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the node's hosts file maps its name to loopback, the route from another node has the address."""
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    monkeypatch.setattr(addresses, "routed_address", lambda: "192.0.2.2")
    assert (own_address("node1"), own_address("localhost"), own_address("127.0.0.1")) == (
        "192.0.2.2",
        "127.0.0.1",
        "127.0.0.1",
    )
    monkeypatch.setattr(addresses, "routed_address", lambda: "")
    assert own_address("node1") == "127.0.0.1"


def test_loopback_names_are_known() -> None:
    """A name that resolves to loopback alone reaches no other node. An address of the documentation range is no node's."""
    assert all(map(stands_for_loopback, ("127.0.1.1", "::1", "localhost")))
    elsewhere = ("198.51.100.7", "no.such.node.invalid", "a" * 300)
    assert not any(map(stands_for_loopback, elsewhere))
    assert [own_address(name) for name in elsewhere] == ["", "", ""]


def test_taken_address_is_refused() -> None:
    """Two sockets cannot listen at one address."""
    with listen_at("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", first.getsockname()[1])
