"""Server of a node's memory states: it lists and sends them to further nodes of the run, and takes copies of theirs."""

import math
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlac_pipeline.extensions.buddies.transfer import (
    Address,
    Connection,
    Guard,
    TransferRefused,
    receive_parts,
    send_parts,
)
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.states import RankState

LIST, FETCH, STORE = "list", "fetch", "store"
"""Operations of a connection."""
TIMEOUT_S = 10.0
"""Seconds without a byte after which a transfer is given up."""
_POLL_S = 0.1
MOST_CONNECTIONS = 1024
"""Connections at one time. More are closed, because each has a thread."""


class WriteTurn:
    """Right to write memory states of other ranks on this node. Another turn ends the one before."""

    def __init__(self, within: Guard = nullcontext) -> None:
        """`within` is the context of a longer turn, in which these are taken."""
        self._within = within
        self._lock = threading.Lock()
        self._turn = 0

    def take(self, *, until: float = math.inf) -> Guard:
        """Return the context of all writes in a new turn. It ends at the latest at a moment of the monotonic clock."""
        with self._lock:
            self._turn += 1
            turn = self._turn

        @contextmanager
        def guard() -> Iterator[None]:
            with self._within(), self._lock:
                if turn != self._turn:
                    raise TransferRefused("another attempt or copy began")
                if time.monotonic() > until:
                    raise TransferRefused("it took too long")
                yield

        return guard


@dataclass(frozen=True, kw_only=True, slots=True)
class _Accepted:
    """The attempt whose states a node copies: never an older attempt's, and never its own ranks'."""

    attempt: int
    nonce: str
    own: Sequence[int]
    guard: Guard
    turns: dict[int, WriteTurn] = field(default_factory=dict)
    """First rank of the sender -> its turn."""

    def take_turn(self, first_rank: int) -> Guard:
        """Return the context of a new copy. It ends the copy before of that sender, which tries again."""
        return self.turns.setdefault(first_rank, WriteTurn(self.guard)).take()

    def check(self, parts: Sequence[RankState]) -> None:
        """Raise `ValueError` for parts of another attempt, or of this node's ranks."""
        for part in parts:
            if (part.attempt, part.nonce) != (self.attempt, self.nonce):
                raise ValueError(f"expected a state of attempt {self.attempt}, found one of attempt {part.attempt}")
            if part.rank in self.own:
                raise ValueError(f"expected ranks of another node, found rank {part.rank}")


class MemoryServer(socketserver.ThreadingTCPServer):
    """Server at an address of this node. `folder` has the run's memory states."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: str, folder: Path, key: bytes) -> None:
        """Raise `OSError` if this node cannot listen there."""
        self._accepted: _Accepted | None = None
        self._folder = folder
        self._key = key
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self.address: Address = (address, self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="memory server", daemon=True).start()

    def accept(self, attempt: int, nonce: str, own: Sequence[int], guard: Guard) -> None:
        """Take copies of an attempt, while the turn of `guard` lasts, but for the ranks of this node (`own`)."""
        with suppress(TransferRefused), guard():
            self._accepted = _Accepted(attempt=attempt, nonce=nonce, own=own, guard=guard)

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection."""
        with Connection.accept(request, self.address, self._key, timeout_s=TIMEOUT_S) as connection:
            asked = connection.receive()
            try:
                self._do(connection, asked)
            except (KeyError, ValueError, TypeError, TransferRefused) as err:
                connection.send(refused=f"{type(err).__name__}: {err}")

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if not too many do."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: the peer notices it."""

    def _do(self, connection: Connection, request: dict[str, Any]) -> None:
        if connection.operation == LIST:
            parts = [[part.slot, states.pack_seal(part.state)] for part in states.read_parts(self._folder)]
            connection.send(parts=parts, room=states.room_for_states(self._folder.parents[1]))
            return
        slot = states.slot_at(self._folder, str(request["slot"]))
        if connection.operation == FETCH:
            ranks = [int(rank) for rank in request["ranks"]]
            send_parts(connection, slot, ranks, seals_only=request.get("seals_only", ()))
        elif connection.operation != STORE:
            raise ValueError(f"expected an operation, found {connection.operation!r}")
        elif request["home"] == home_of(self._folder):
            connection.send(is_same=True)
        else:
            accepted = self._accepted
            if accepted is None:
                raise TransferRefused("this node trains no attempt yet")
            connection.send(is_same=False)
            receive_parts(connection, slot, accepted.take_turn(int(request["first_rank"])), accepted.check)
            connection.send()


def home_of(folder: Path) -> str:
    """Return the identity of a folder in memory. Two supervisors on one node may have the same one."""
    with states.opened(folder) as here:
        found = os.fstat(here)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else os.uname().nodename}/{found.st_dev}/{found.st_ino}"
