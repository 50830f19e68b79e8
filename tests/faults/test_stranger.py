"""A stranger in another network namespace tries to join, read, stop and poison a run, and fails.

The nodes and the stranger have their own network (`tests/network_namespaces.py`). They share the lakehouse's folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.fernet import Fernet

from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.lakehouse.errors import NodesMissing, SpecInvalid
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from tests.conftest import PROGRAMS, wait_until
from tests.launched_nodes import SECRET, check_exact, job
from tests.network_namespaces import NetworkNode, network_node, open_switch

if TYPE_CHECKING:
    from tests.conftest import Arena, Launch

PORT = 29400
"""A port that is free on every node of a test."""
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass
class Lan:
    """A switch, and the nodes on it."""

    arena: Arena
    stack: ExitStack

    def add_node(self, name: str) -> NetworkNode:
        """Return a new node."""
        return self.stack.enter_context(network_node(name))


@pytest.fixture
def lan(arena: Arena) -> Iterator[Lan]:
    """A switch, and a lakehouse with a table in a folder that all nodes share."""
    arena.table()
    with ExitStack() as stack:
        stack.enter_context(open_switch())
        stack.callback(arena.close)
        yield Lan(arena, stack)


class Stranger:
    """`tests/programs/stranger.py` on a node."""

    def __init__(self, on: NetworkNode, rendezvous: str, prefix: str, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.strike = folder / "struck"
        address, _, port = rendezvous.rpartition(":")
        program = [sys.executable, str(PROGRAMS / "stranger.py")]
        arguments = [address, port, prefix, str(folder / "report.json"), str(self.strike)]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([*on.command, *program, *arguments], stdout=log, stderr=log)

    def report(self) -> dict[str, Any]:
        """End it, and return its actions and the messages that it read."""
        (self._folder / "enough").touch()
        assert self.process.wait(60) == 0, (self._folder / "log").read_text()[-3000:]
        found: dict[str, Any] = json.loads((self._folder / "report.json").read_text())
        return found

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def with_key(on: NetworkNode, key: str) -> list[str]:
    """Return a command that runs a program on a node with another key, or without one if it is empty."""
    change = [f"{KEY_VARIABLE}={key}"] if key else ["-u", KEY_VARIABLE]
    return [*on.command, "env", *change]


def open_message(raw: str) -> tuple[str, Any]:
    """Open a sealed message. Return its name and its content."""
    cipher = Fernet(base64.urlsafe_b64encode(hashlib.sha256(SECRET.encode()).digest()))
    key, message = json.loads(cipher.decrypt(raw))
    return key, message


def listening(on: NetworkNode) -> set[tuple[str, int]]:
    """Return the addresses, as the kernel writes them, and ports at which processes of a node listen."""
    command = ["ip", "netns", "exec", on.name, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = [line.split() for line in lines if ":" in line.split()[0] and line.split()[3] == LISTENS]
    return {(address, int(port, 16)) for address, _, port in (each[1].partition(":") for each in fields)}


def is_loopback(address: str) -> bool:
    """Return whether an address in the kernel's form, in little-endian words, is a loopback address."""
    raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    text = socket.inet_ntop(family, raw).removeprefix("::ffff:")
    return text.startswith("127.") or text == "::1"


def reached_ports(of: NetworkNode, ports: list[int], *, by: NetworkNode) -> list[int]:
    """Return the ports of a node that accept a connection from another node."""
    program = (
        "import socket, sys\n"
        "for port in sys.argv[2:]:\n"
        "    with socket.socket() as probe:\n"
        "        probe.settimeout(2)\n"
        "        if probe.connect_ex((sys.argv[1], int(port))) == 0:\n"
        "            print(port)\n"
    )
    command = [*by.command, sys.executable, "-c", program, of.address, *map(str, ports)]
    return [int(port) for port in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def watch_sockets(on: NetworkNode, launch: Launch, *, by: NetworkNode) -> tuple[set[tuple[str, int]], list[int]]:
    """Return a node's listening sockets until a launch ends, and those of its ports that another node reached."""
    found: set[tuple[str, int]] = set()
    open_to: list[int] = []
    while launch.process.poll() is None:
        new = listening(on) - found
        found |= new
        if new:
            open_to += reached_ports(on, [port for _, port in new], by=by)
        time.sleep(0.05)
    return found, open_to


@pytest.mark.soak
def test_stranger_learns_and_changes_nothing(lan: Lan, tmp_path: Path) -> None:
    """Two nodes train exactly, although a stranger without the key attacks their store each second from the beginning.

    The nodes are stopped once, and meet again at an empty store. There the stranger replays messages of the first store.
    """
    node, other, elsewhere = (lan.add_node(f"dlac-{name}") for name in ("a", "b", "x"))
    times = {"node_timeout_s": 20, "gather_timeout_s": 300}
    spec = job(lan.arena, "watched", nodes="2", rendezvous=f"{node.address}:{PORT}", **times)
    prefix = f"dlac/{spec.run}@{Ledger(lan.arena.lakehouse).table_uuid}"
    stranger = Stranger(elsewhere, spec.launch.rendezvous, prefix, tmp_path / "stranger")
    lan.stack.callback(stranger.close)
    launches = [lan.arena.launch(spec, under=each.command) for each in (node, other)]
    wait_until(lambda: bool(lan.arena.rows(spec.run, CheckpointRow)), what="a checkpoint")
    assert reached_ports(node, [PORT], by=elsewhere) == [PORT]
    os.kill(launches[0].process.pid, signal.SIGTERM)
    _check_ended(launches, "stopped")
    _check_ended([lan.arena.launch(spec, under=each.command) for each in (node, other)], "finished")
    report = stranger.report()
    assert len(report["done"]) == 10, report["done"]
    assert len(lan.arena.rows(spec.run, ClaimRow)) == 2
    assert not stranger.strike.exists()
    check_exact(lan.arena, spec.run, [2])
    resumed_from = [row for row in lan.arena.lineage(spec.run) if row.attempt == 1][-1]
    folder = resumed_from.manifest_uri.rsplit("/", 2)[1]
    _check_unreadable(report["read"], prefix, secrets=[node.name, other.name, node.address, folder])


def _check_ended(launches: list[Launch], ending: str) -> None:
    """Check that all launches have this ending, and that none failed."""
    assert [launch.wait() for launch in launches] == [0, 0], [launch.stderr[-3000:] for launch in launches]
    assert [launch.of("ended")[0]["ending"] for launch in launches] == [ending] * 2
    assert [launch.of("failure") for launch in launches] == [[], []]


def _check_unreadable(read: dict[str, list[str]], prefix: str, *, secrets: list[str]) -> None:
    """Check that the stranger read the resume point and the members only in sealed form."""
    values = [raw for key, found in read.items() for raw in found if key.startswith(prefix)]
    messages = [open_message(raw) for raw in values]
    assert {message["attempt"] for key, message in messages if "/resume/" in key} == {1, 2}
    known = json.dumps(messages)
    assert [secret for secret in secrets if secret not in known] == []
    for raw in values:
        inside = base64.urlsafe_b64decode(raw)
        assert not any(secret.encode() in inside or secret in raw for secret in [*secrets, "attempt", "step"])


@pytest.mark.soak
@pytest.mark.parametrize("key", ["", "not the key of these nodes"])
def test_stranger_does_not_join(lan: Lan, key: str) -> None:
    """A node without the key reports the missing key. Two nodes with it train in one attempt."""
    node, other, elsewhere = (lan.add_node(f"dlac-{name}") for name in ("a", "b", "x"))
    spec = job(lan.arena, "joined", nodes="2:3", rendezvous=f"{node.address}:{PORT}", batch_size=24)
    launches = [lan.arena.launch(spec, under=each.command) for each in (node, other)]
    wait_until(lambda: bool(lan.arena.rows(spec.run, CheckpointRow)), what="a checkpoint")
    launch = spec.launch.model_copy(update={"gather_timeout_s": 3.0})
    joins = lan.arena.launch(spec.model_copy(update={"launch": launch}), under=with_key(elsewhere, key))
    assert joins.wait() == (NodesMissing if key else SpecInvalid).exit_code
    wanted = "nodes with another key" if key else "openssl rand -hex 32"
    assert wanted in joins.of("error")[0]["message"]
    assert [each.wait() for each in launches] == [0, 0], [each.stderr[-3000:] for each in launches]
    assert len(lan.arena.rows(spec.run, ClaimRow)) == 1
    check_exact(lan.arena, spec.run, [2], batch_size=24)


@pytest.mark.soak
def test_single_node_is_unreachable(lan: Lan) -> None:
    """A run of one node and two ranks listens on loopback only, from its start to its end."""
    node, elsewhere = lan.add_node("dlac-a"), lan.add_node("dlac-x")
    spec = lan.arena.spec("lone", passes=1)
    launch = lan.arena.launch(spec, under=node.command)
    found, open_to = watch_sockets(node, launch, by=elsewhere)
    assert launch.wait() == 0, launch.stderr[-3000:]
    assert found
    assert [address for address, _ in found if not is_loopback(address)] == []
    assert open_to == []
