"""Stores of this node listen at the address that was given and at no other."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from catalog.errors import RendezvousInvalid, SpecInvalid
from dlac_pipeline.launch_spec import LaunchSpec
from dlac_pipeline.nodes.rendezvous import Rendezvous, serve
from dlac_pipeline.nodes.rendezvous_state import decode_state, encode_state
from dlac_pipeline.ranks import addresses, process_group
from dlac_pipeline.ranks.addresses import listen_at, own_address, stands_for_loopback
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
    """Whether a second connection is taken there."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_served_rendezvous_listens_there_only() -> None:
    """`dlac rendezvous` takes connections at its address and refuses them at another one of this node."""
    port, ready, ends = own_port(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, f"127.0.0.1:{port}", ends, ready.set)
        try:
            assert ready.wait(60)
            assert (answers("127.0.0.1", port), answers(OTHER_LOOPBACK, port)) == (True, False)
        finally:
            ends.set()
        serving.result()


def test_node_serves_its_address_only() -> None:
    """So does a node that serves the rendezvous of its run."""
    port = own_port()
    launch = LaunchSpec(script="x", nodes="1:2", rendezvous=f"127.0.0.1:{port}", last_call_s=1)
    rendezvous = Rendezvous(launch, "r")
    assert rendezvous.join(NEVER, lambda: None) is not None
    assert (answers("127.0.0.1", port), answers(OTHER_LOOPBACK, port)) == (True, False)
    rendezvous.leave()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no.such.node.invalid:1", ":80", "127.0.0.1", "127.0.0.1:x"])
def test_unusable_rendezvous_is_refused(address: str) -> None:
    """An address at which this node cannot listen is named."""
    with pytest.raises(SpecInvalid, match="host:port"):
        serve(address, NEVER, lambda: None)


def test_group_store_listens_at_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's store of the process group, which a script makes by itself, is the one that DLAC has opened."""
    port = own_port()
    said = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "_SERVED", [])
    process_group.serve_group_store()
    dist.init_process_group("gloo")
    try:
        assert (answers("127.0.0.1", port), answers(OTHER_LOOPBACK, port)) == (True, False)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("content", [b"{}", b"null", b"[" * 100_000, b"\xff", b'{"round": 1}'])
@pytest.mark.parametrize("encoded", [True, False])
def test_foreign_content_is_refused(content: bytes, encoded: bool) -> None:
    """A rendezvous with content of strangers ends the join with an error that says so."""
    check_join_refuses(b64encode(content).decode() if encoded else content.decode(errors="replace") or " ")


def test_stored_pickle_is_not_run(tmp_path: Path) -> None:
    """A pickle in the rendezvous' place does nothing on the nodes that join."""
    check_join_refuses(b64encode(pickle.dumps(Strike(tmp_path / "struck"))).decode())
    assert not (tmp_path / "struck").exists()


def check_join_refuses(content: str) -> None:
    """Join at a store that a stranger has written to."""
    server = process_group.serve_store("127.0.0.1", own_port())
    stranger = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    stranger.set("torch.rendezvous.r", content)
    launch = LaunchSpec(script="x", nodes="2", rendezvous=f"127.0.0.1:{server.port}", last_call_s=1)
    rendezvous = Rendezvous(launch, "r")
    with pytest.raises(RendezvousInvalid, match="keep its port within the cluster"):
        rendezvous.join(NEVER, lambda: None)
    rendezvous.leave()


def test_pickle_beside_members_is_not_run(tmp_path: Path) -> None:
    """A state that a stranger replaces while nodes wait is not run by the ones that wait."""
    server = process_group.serve_store("127.0.0.1", own_port())
    launch = LaunchSpec(script="x", nodes="2", rendezvous=f"127.0.0.1:{server.port}", last_call_s=1)
    waiting = Rendezvous(launch, "r")
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(waiting.join, NEVER, lambda: None)
        server.wait(["torch.rendezvous.r"])
        server.set("torch.rendezvous.r", b64encode(pickle.dumps(Strike(tmp_path / "struck"))).decode())
        with pytest.raises(RendezvousInvalid):
            joined.result()
    assert not (tmp_path / "struck").exists()


def test_state_survives_its_encoding() -> None:
    """What is read is what was written, and equal states have equal bytes."""
    nodes = [_NodeDesc("10.0.0.1", 7, number) for number in range(3)]
    state = _RendezvousState()
    state.round, state.complete, state.deadline = 4, True, datetime.now(UTC)
    state.participants = {nodes[1]: 1, nodes[0]: 0}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[0]}
    state.last_heartbeats = dict.fromkeys(nodes, datetime.now(UTC))
    read = decode_state(encode_state(state))
    assert vars(read) == vars(state)
    state.participants = dict(reversed(state.participants.items()))
    assert encode_state(state) == encode_state(read)


def test_naive_moment_is_refused() -> None:
    """A moment without a time zone could not be compared."""
    content = encode_state(_RendezvousState()).replace(b'"deadline":null', b'"deadline":"2026-01-01T00:00:00"')
    with pytest.raises(RendezvousStateError):
        decode_state(content)


def test_hidden_name_stands_for_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's name that its hosts file maps to loopback stands for the address by which others reach the node."""
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    monkeypatch.setattr(addresses, "_routed_address", lambda: "192.0.2.2")
    assert (own_address("node1"), own_address("localhost"), own_address("127.0.0.1")) == (
        "192.0.2.2",
        "127.0.0.1",
        "127.0.0.1",
    )
    monkeypatch.setattr(addresses, "_routed_address", lambda: "")
    assert own_address("node1") == "127.0.0.1"


def test_loopback_names_are_known() -> None:
    """A name that resolves to loopback alone reaches no other node; one that resolves to nothing is no such name."""
    assert all(map(stands_for_loopback, ("127.0.1.1", "::1", "localhost")))
    assert not any(map(stands_for_loopback, ("198.51.100.7", "no.such.node.invalid", "a" * 300)))


def test_other_node_has_no_address() -> None:
    """An address of documentation is no node's."""
    assert (own_address("198.51.100.7"), own_address("no.such.node.invalid"), own_address("a" * 300)) == ("", "", "")


def test_taken_address_is_refused() -> None:
    """Two sockets do not listen at one address."""
    with listen_at("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", first.getsockname()[1])
