"""Connections between replica groups: the process group of those present, the state for a newcomer, and the watch of nodes.

Gloo closes the connections of a group once none of its reductions is under way, and waits for that. A step must not wait for it,
so they are closed in threads of their own.

A process whose node is lost closes no connection. `NodeWatch` closes them at this end, once the lighthouse has had no heartbeat.
"""

import hmac
import io
import math
import os
import re
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from blake3 import blake3
from torchft import ProcessGroupGloo
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing._serialization import _streaming_load

from dlac_pipeline.extensions.replicas.rank import HEARTBEAT_TIMEOUT_S, open_directly, url_host

_NUMBER, _PROOF = "DLAC-Number", "DLAC-Proof"
_DIGEST_BYTES = 32
_LOOK_S = 0.1
_STATUS_S = 0.5
"""Seconds within which the lighthouse answers. It may be on the lost node."""
_MEMBER = re.compile(r"<b>(\S+)</b>.*?Manager: http://(\S+):\d+", re.DOTALL)
_SEEN = re.compile(r"(\S+): seen ([0-9.]+)s ago")


class Peers(ProcessGroupGloo):  # type: ignore[misc]  # published without types
    """Process group of the groups present. Each quorum with other members configures it again."""

    _pg: Any
    meeting: str = ""
    """Address of the stores of the last quorum, which no other quorum has."""
    collective_timeout: timedelta
    """Time limit of a collective. That of connecting is the group's own: a peer may die before it connects."""

    def configure(self, store_addr: str, *arguments: Any, **options: Any) -> None:
        """Connect the groups of a quorum."""
        super().configure(store_addr, *arguments, **options)
        self.meeting = store_addr

    def abort(self, errored: bool = True) -> None:
        """Close the connections in the background."""
        self.drop(())

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        group = super()._create_pg(store, rank, world_size)
        group._get_backend(torch.device("cpu"))._set_default_timeout(self.collective_timeout)
        return group

    def drop(self, works: Sequence[Any]) -> None:
        """Close the connections in the background after failed collectives. Peers that wait for this group fail at once.

        The connections close once nothing refers to them. torchft's `works` are in reference cycles, and refer to Gloo's.
        """
        connected = [self._pg, *(vars(work).pop("_work", None) for work in works)]
        self._pg = None
        threading.Thread(target=connected.clear, name="closing", daemon=True).start()


class StateServer(HTTPTransport[dict[str, Any]]):  # type: ignore[misc]  # published without types
    """Server of this group's state for newcomers: torchft's, with proofs that both ends have the key of the groups.

    A request names a random number, and proves the key. The answer ends with a digest of its content, to which the number and the
    key belong. A newcomer checks it before it unpickles anything.
    """

    def __init__(self, limit: timedelta, address: str, key: bytes) -> None:
        """`address` is that of this node for the groups. A name of the node may have none, as in a container."""
        self._address, self._key = address, key  # which torchft asks for at once
        super().__init__(limit, num_chunks=0)
        self._server.RequestHandlerClass = _handler_of(self._server.RequestHandlerClass, key)

    def address(self) -> str:
        """Return the address of the states, without the step."""
        return f"http://{url_host(self._address)}:{self._server.socket.getsockname()[1]}/checkpoint/"

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Return the state of a peer. Raise `OSError` if it does not have the key."""
        url, number = f"{metadata}{step}/full", secrets.token_hex(_DIGEST_BYTES)
        headers = {_NUMBER: number, _PROOF: _proof(self._key, number, urlsplit(url).path)}
        with open_directly(urllib.request.Request(url, headers=headers), timeout.total_seconds()) as answer:
            content = memoryview(answer.read())
        signed = blake3(number.encode(), key=self._key).update(content[:-_DIGEST_BYTES])
        if not hmac.compare_digest(signed.digest(), content[-_DIGEST_BYTES:]):
            raise OSError(
                f"expected the state of a replica group of this run from {url}, found one that was not signed by it"
            )
        state: dict[str, Any] = _streaming_load(io.BytesIO(content[:-_DIGEST_BYTES]), weights_only=False)
        return state


def _proof(key: bytes, number: str, path: str) -> str:
    return blake3(f"{number} {path}".encode(), key=key).hexdigest()


def _handler_of(handler: Any, key: bytes) -> Any:
    """Return torchft's handler of requests, which answers only those with the key, and signs its answers."""

    class Handler(handler):  # type: ignore[misc]  # torchft makes the class
        def do_GET(self) -> None:  # noqa: N802  # http.server names it
            number = self.headers.get(_NUMBER, "")
            if not hmac.compare_digest(_proof(key, number, self.path), self.headers.get(_PROOF, "")):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            plain: Any = self.wfile
            self._signed = blake3(number.encode(), key=key)
            super().do_GET()
            plain.write(self._signed.digest())

        def end_headers(self) -> None:
            super().end_headers()
            if hasattr(self, "_signed"):
                self.wfile: Any = _SignedOutput(self.wfile, self._signed)

    return Handler


class _SignedOutput(io.BufferedIOBase):
    """Output of an answer, whose content belongs to a digest."""

    def __init__(self, output: Any, signed: Any) -> None:
        self._output, self._signed = output, signed

    def write(self, content: Any) -> int:
        self._signed.update(content)
        written: int = self._output.write(content)
        return written


class NodeWatch:
    """Watch of the nodes of a group's peers, in a thread. It ends waits for a lost node, which has closed no connection."""

    def __init__(self, address: str, lighthouse: Callable[[], str]) -> None:
        """`address` is that of this node, and `lighthouse` returns the URL of the lighthouse."""
        self._address, self._lighthouse = address, lighthouse
        self.waits_since = math.inf
        """Moment of the monotonic clock at which the group began to wait for its peers. Infinite: it does not."""
        self._hosts: dict[str, str] = {}
        """Addresses of the groups of quorums, by the name of their process."""
        threading.Thread(target=self._watch, name="watch of nodes", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch while the group waits."""
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            if self.waits_since < time.monotonic() - _LOOK_S:
                with (
                    suppress(OSError, HTTPException),
                    open_directly(f"{self._lighthouse()}/status", _STATUS_S) as answer,
                ):
                    for host in self._lost(answer.read().decode()):
                        close_connections(host)

    def _lost(self, status: str) -> set[str]:
        """Return the addresses of other nodes without a heartbeat of any group, by the page of the lighthouse."""
        self._hosts |= dict(_MEMBER.findall(status))
        seen = {name: float(seconds) < HEARTBEAT_TIMEOUT_S for name, seconds in _SEEN.findall(status)}
        hosts = {host: False for host in self._hosts.values() if host != url_host(self._address)}
        for name, host in self._hosts.items():
            hosts[host] = hosts.get(host, True) or seen.get(name, False)
        return {host.strip("[]") for host, lives in hosts.items() if not lives and host != url_host(self._address)}


def close_connections(host: str) -> None:
    """Shut down all connections of this process to an address, so that whatever waits for it fails."""
    for each in psutil.Process().net_connections("tcp"):
        if each.fd >= 0 and each.raddr and each.raddr.ip.removeprefix("::ffff:") == host:
            with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
