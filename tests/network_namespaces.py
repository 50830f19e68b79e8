"""Hosts of a test's own: network namespaces on one switch, each with a name, an address and processes; cables can be pulled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pytest

SWITCH_HOST = "dlac-lake"
_BRIDGE = "switch"
_NUMBERS = count(1)


@dataclass(frozen=True)
class Host:
    """A network namespace, plugged into the switch of `SWITCH_HOST`."""

    name: str
    address: str

    @property
    def command(self) -> list[str]:
        """What runs a program there, with the host's name as its own."""
        renamed = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", renamed, self.name]

    def unplug(self) -> None:
        """Pull the cable: nothing is refused, nothing answers."""
        _ip("-n", SWITCH_HOST, "link", "set", f"to-{self.name}", "down")

    def plug(self) -> None:
        """And back."""
        _ip("-n", SWITCH_HOST, "link", "set", f"to-{self.name}", "up")


@contextmanager
def switched() -> Iterator[str]:
    """A switch on a host of its own, which has its address; gives that. Nothing is connected with this machine's network."""
    if (
        shutil.which("ip") is None
        or subprocess.run(["ip", "netns", "add", SWITCH_HOST], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs iproute2, and to be allowed network namespaces")
    try:
        _ip("-n", SWITCH_HOST, "link", "set", "lo", "up")
        _ip("-n", SWITCH_HOST, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", SWITCH_HOST, "addr", "add", "10.77.0.1/24", "dev", _BRIDGE)
        _ip("-n", SWITCH_HOST, "link", "set", _BRIDGE, "up")
        yield "10.77.0.1"
    finally:
        _ip("netns", "del", SWITCH_HOST)


@contextmanager
def host(name: str) -> Iterator[Host]:
    """Another host on the switch."""
    made = Host(name, f"10.77.0.{10 + next(_NUMBERS)}")
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", SWITCH_HOST, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", SWITCH_HOST, "link", "set", f"to-{name}", "master", _BRIDGE, "up")
        _ip("-n", name, "addr", "add", f"{made.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
