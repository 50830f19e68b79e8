"""The store through which the nodes of a run meet: PyTorch's TCPStore at a host:port, served by the node with that address.

With several addresses the nodes meet at the first that answers. The next one is served once those before it are silent.

A network that has gone silent may block a call without an end, so none is made on the caller's thread.
"""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.elastic.ranks.addresses import own_address, stands_for_loopback
from dlac_pipeline.elastic.ranks.process_group import serve_store

Result = TypeVar("Result")
_POLL_S = 0.1
_CONNECT_S = 2.0


class Endpoint:
    """The addresses of a rendezvous, and the one in use. The node with that address serves it, until it moves to another one."""

    def __init__(self, addresses: str, *, timeout_s: float) -> None:
        """`addresses` have commas between them. `timeout_s`: how long a call to the store may take."""
        self._addresses = addresses
        self._places = [split_address(each) for each in addresses.split(",")]
        self._place = 0
        """Index of the address in use, which is tried first."""
        self._timeout = timedelta(seconds=timeout_s)
        self._served: TCPStore | None = None

    @property
    def serves(self) -> bool:
        """True if this process serves the store."""
        return self._served is not None

    def connect(self, trains: Callable[[TCPStore], bool] = lambda store: False) -> TCPStore:
        """Return a connection to the store, or the store served here. Raise `OSError` if none answers.

        The first store that answers is used, or a later one where nodes train.
        """
        if self._served is not None:
            return self._served
        found = None
        for place in (self._place, *self._others()):
            store = self._ask(place, _is_there if found is None else trains)
            if store is not None:
                self._place, found = place, store
        if found is not None:
            return found
        own = [place for place, (host, _) in enumerate(self._places) if own_address(host)]
        if not own:
            raise OSError(f"no rendezvous answers at {self._addresses!r}")
        self._served = serve_store(own_address(self._places[own[0]][0]), self._places[own[0]][1], timeout=self._timeout)
        self._place = own[0]
        return self._served

    def find_better(self, trains: Callable[[TCPStore], bool]) -> int | None:
        """Return the address at which a node that waits here should wait: an earlier one, or a later one where nodes train.

        So nodes that wait at two addresses meet at the first. None: this address is the best that answers.
        """
        for place in self._others():
            if self._ask(place, _is_there if place < self._place else trains) is not None:
                return place
        return None

    def _ask(self, place: int, question: Callable[[TCPStore], bool]) -> TCPStore | None:
        """Return the store at an address if the answer is yes. None if it is not given in this address' share of the time."""

        def ask() -> TCPStore | None:
            if not self._is_served(place):
                return None
            store = self.open_client(timeout_s=self._timeout.total_seconds(), place=place)
            return store if question(store) else None

        share_s = 2.0 * self._timeout.total_seconds() / len(self._places)
        with suppress(OSError, RuntimeError):
            return self.in_time(ask, share_s, over=lambda: False)
        return None

    def move(self, place: int) -> None:
        """Use another address from now on. A store that is served here ends with its last connection of this node."""
        self._place, self._served = place, None

    def open_client(self, *, timeout_s: float, place: int | None = None) -> TCPStore:
        """Return a new connection to a served store, or raise `RuntimeError`. Its calls wait for a key this long at most."""
        (host, port), patience = self._places[self._place if place is None else place], timedelta(seconds=timeout_s)
        return TCPStore(own_address(host) or host, port, is_master=False, wait_for_workers=False, timeout=patience)

    @property
    def hint(self) -> str:
        """Return advice where the host name means this node only, or an empty string where other nodes may reach it."""
        if not stands_for_loopback(self._host):
            return ""
        return (
            f"; {self._host!r} stands for a loopback address on this node: give an IP address, or a name that other nodes "
            "resolve"
        )

    def local_address(self) -> str:
        """Return the address at which all further nodes reach this one. Raise `OSError` if there is no route to the endpoint."""
        own = own_address(self._host)
        if own:
            return own
        family, kind, _, _, where = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # nothing is sent
            probe.connect(where)
            return str(probe.getsockname()[0])

    @property
    def _host(self) -> str:
        return self._places[self._place][0]

    @property
    def _port(self) -> int:
        return self._places[self._place][1]

    def _others(self) -> list[int]:
        return [place for place in range(len(self._places)) if place != self._place]

    def _is_served(self, place: int) -> bool:
        host, port = self._places[place]
        return is_listening(own_address(host) or host, port)

    @staticmethod
    def in_time(call: Callable[[], Result], within_s: float, *, over: Callable[[], bool]) -> Result | None:
        """Return the result of a call on a thread, or None once `over` is true. Raise `NotInTime` when its time is over."""
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as err:
                future.set_exception(err)

        threading.Thread(target=work, name="rendezvous", daemon=True).start()
        deadline = time.monotonic() + within_s
        while True:
            with suppress(NotInTime):
                return future.result(_POLL_S)
            if future.done():
                return future.result()
            if time.monotonic() > deadline:
                raise NotInTime
            if over():
                return None


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of host:port, where an IPv6 address has brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_there(store: TCPStore) -> bool:
    """Return True: a store that answers is enough."""
    return True


def is_listening(host: str, port: int) -> bool:
    """Return whether a process listens there: TCPStore prints its whole stack where none does."""
    with suppress(OSError), socket.create_connection((host, port), _CONNECT_S):
        return True
    return False
