"""Connections between replica groups: the process group of those present, the state for a newcomer, and the watch of nodes.

Gloo closes the connections of a group once none of its reductions is under way, and waits for that. A step must not wait for it,
so they are closed in threads of their own. A process whose node is lost closes none: `NodeWatch` does at this end.
"""

import io
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.client import HTTPException
from typing import Any

import psutil
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torchft import ProcessGroupGloo
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing._serialization import _streaming_load

from dlac_pipeline.elastic.ranks.addresses import LOOPBACK
from dlac_pipeline.extensions.replicas.rank import HEARTBEAT_TIMEOUT_S, open_directly, url_host

_OWN_CLIENTS = (LOOPBACK, f"::ffff:{LOOPBACK}")
_NO_PROXY = "no_proxy"
_NUMBER_BYTES = 12
_PART_BYTES = 1 << 30
"""Bytes of a state that are sealed together."""
_LOOK_S = 0.1
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
    """Server of this group's state, for newcomers: torchft's, at an address instead of the node's name, which may have none.

    With a key the state is sealed, and a newcomer unpickles only what the key opens. Without one other nodes get no answer.
    """

    def __init__(self, limit: timedelta, address: str, key: bytes) -> None:
        self._address, self._key = address, key  # which torchft asks for at once
        super().__init__(limit, num_chunks=0)
        if not key:
            self._server.verify_request = lambda request, client: client[0] in _OWN_CLIENTS
        os.environ[_NO_PROXY] = ",".join(filter(None, [os.environ.get(_NO_PROXY), LOOPBACK]))

    def address(self) -> str:
        """Return the address of the states, without the step."""
        return f"http://{url_host(self._address)}:{self._server.socket.getsockname()[1]}/checkpoint/"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Serve the state after a step."""
        if self._key:
            torch.save(state_dict, content := io.BytesIO())
            whole, cipher, parts = content.getbuffer(), AESGCM(self._key), list[torch.Tensor]()
            for begin in range(0, len(whole), _PART_BYTES):
                number = os.urandom(_NUMBER_BYTES)
                sealed = cipher.encrypt(
                    number, whole[begin : begin + _PART_BYTES], f"{step} {begin} {len(whole)}".encode()
                )
                parts.append(torch.frombuffer(bytearray(number + sealed), dtype=torch.uint8))
            state_dict = {"bytes": len(whole), "parts": parts}
        super().send_checkpoint(dst_ranks, step, state_dict, timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of a peer after a step. Raise `InvalidTag` if the key does not open it."""
        if not self._key:
            return super().recv_checkpoint(src_rank, metadata, step, timeout)
        with open_directly(f"{metadata}{step}/full", timeout.total_seconds()) as answer:
            found: Any = _streaming_load(answer, weights_only=True)
        cipher, content = AESGCM(self._key), io.BytesIO()
        for part in (memoryview(each.numpy()) for each in found["parts"]):
            name = f"{step} {content.tell()} {found['bytes']}".encode()
            content.write(cipher.decrypt(part[:_NUMBER_BYTES], part[_NUMBER_BYTES:], name))
        content.seek(0)
        return torch.load(content, weights_only=False)


class NodeWatch:
    """Watch of the nodes of a group's peers, in a thread. It ends waits for a lost node, which has closed no connection."""

    def __init__(self, address: str, lighthouse: Callable[[], str]) -> None:
        """`address` is that of this node, and `lighthouse` returns the URL of the lighthouse."""
        self._address, self._lighthouse = url_host(address), lighthouse
        self._waits_since, self._hosts = math.inf, dict[str, str]()
        """Addresses of the processes that were in quorums, by their names."""
        threading.Thread(target=self._watch, name="watch of nodes", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch while the group waits."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            if time.monotonic() - self._waits_since > _LOOK_S:
                with suppress(OSError, HTTPException):
                    for host in self._lost(
                        open_directly(f"{self._lighthouse()}/status", HEARTBEAT_TIMEOUT_S).read().decode()
                    ):
                        _close_connections(host.strip("[]"))

    def _lost(self, status: str) -> set[str]:
        """Return the addresses of nodes, except the lighthouse's, of which no process sends heartbeats, by its page."""
        self._hosts |= dict(_MEMBER.findall(status))
        seen = [name for name, seconds in _SEEN.findall(status) if float(seconds) < HEARTBEAT_TIMEOUT_S]
        answers = self._lighthouse().partition("//")[2].rpartition(":")[0]
        return {*self._hosts.values()} - {self._hosts.get(name, "") for name in seen} - {self._address, answers}


def _close_connections(host: str) -> None:
    """Shut down all connections of this process to an address, so that whatever waits for it fails."""
    for each in psutil.Process().net_connections("tcp"):
        if each.fd >= 0 and each.raddr and each.raddr.ip.removeprefix("::ffff:") == host:
            with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
