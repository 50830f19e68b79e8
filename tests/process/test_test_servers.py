"""Ports and networks that the tests' own servers use."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from tests.object_store import Network
from tests.ports import own_port


def test_port_is_kept_for_later_server() -> None:
    """Several servers can use the port one after another. No other process gets it, and it refuses connections before."""
    port = own_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass
    assert TCPStore("127.0.0.1", port, None, True, wait_for_workers=False).port == port


def test_refusing_network_recovers_with_server() -> None:
    """Connections succeed once the server starts again. No client waits for an answer without a server."""
    port = own_port()
    network = Network(port)
    through = ("127.0.0.1", int(network.url.rpartition(":")[2]))
    try:
        for _ in range(2):
            with socket.create_connection(through, timeout=30) as client:
                assert client.recv(1) == b""
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(through) as client:
            near, _ = server.accept()
            with near:
                near.sendall(b"x")
                assert client.recv(1) == b"x"
    finally:
        network.close()
