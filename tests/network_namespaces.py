"""Nodes of a test: network namespaces on one switch, each with a name, an address and processes. Cables can be pulled."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pytest

SWITCH = "dlac-lake"
_BRIDGE = "switch"
_NUMBERS = count(1)


@dataclass(frozen=True)
class NetworkNode:
    """A network namespace, plugged into the switch of `SWITCH`."""

    name: str
    address: str

    @property
    def command(self) -> list[str]:
        """Return the command that runs a program on the node, under the node's name and with separate shared memory."""
        renamed = 'mount -t tmpfs memory /dev/shm && hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", renamed, self.name]

    def unplug(self) -> None:
        """Pull the cable: no connection is refused, and none is answered."""
        _ip("-n", SWITCH, "link", "set", f"to-{self.name}", "down")

    def plug(self) -> None:
        """Plug the cable in again."""
        _ip("-n", SWITCH, "link", "set", f"to-{self.name}", "up")


@contextmanager
def open_switch() -> Iterator[str]:
    """Make a switch, and yield the address of its namespace. It has no connection to this node's network."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    for name in (line.split()[0] for line in _ip("netns", "list").splitlines()):
        if name.startswith("dlac-") and not _ip("netns", "pids", name):  # a killed test has left it
            _ip("netns", "del", name)
    added = subprocess.run(["ip", "netns", "add", SWITCH], check=False, capture_output=True, text=True)
    if added.returncode:
        pytest.skip(f"needs to be allowed network namespaces, found: {added.stderr.strip()}")
    try:
        _ip("-n", SWITCH, "link", "set", "lo", "up")
        _ip("-n", SWITCH, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", SWITCH, "addr", "add", "10.77.0.1/24", "dev", _BRIDGE)
        _ip("-n", SWITCH, "link", "set", _BRIDGE, "up")
        yield "10.77.0.1"
    finally:
        _ip("netns", "del", SWITCH)


@contextmanager
def network_node(name: str) -> Iterator[NetworkNode]:
    """Add a node to the switch."""
    node = NetworkNode(name, f"10.77.0.{10 + next(_NUMBERS)}")
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", SWITCH, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", SWITCH, "link", "set", f"to-{name}", "master", _BRIDGE, "up")
        _ip("-n", name, "addr", "add", f"{node.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        yield node
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
