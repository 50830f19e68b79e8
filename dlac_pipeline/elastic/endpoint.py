"""The store through which the nodes of a run meet: PyTorch's TCPStore at a host:port, served by the node with that address.

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
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.launch_spec import check_port

Result = TypeVar("Result")
_POLL_S = 0.1
_CONNECT_S = 2.0


class Endpoint:
    """The host:port of a rendezvous. The node with that address serves it, once, while this object exists."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """`timeout_s`: how long a call to the store may take."""
        self._address = address
        self._host, self._port = _split(address)
        self._timeout = timedelta(seconds=timeout_s)
        self._served: TCPStore | None = None

    @property
    def serves(self) -> bool:
        """True if this process serves the store."""
        return self._served is not None

    def connect(self) -> TCPStore:
        """Return a connection to the store, or the store served here. Raise `OSError` or `RuntimeError` if none answers."""
        own = own_address(self._host)
        if self._served is None:
            if _answers(own or self._host, self._port):
                return self.open_client(timeout_s=self._timeout.total_seconds())
            if not own:
                raise OSError(f"no rendezvous answers at {self._address!r}")
            self._served = serve_store(own, self._port, timeout=self._timeout)
        return self._served

    def open_client(self, *, timeout_s: float) -> TCPStore:
        """Return a new connection to a served store, or raise `RuntimeError`. Its calls wait for a key this long at most."""
        host, patience = own_address(self._host) or self._host, timedelta(seconds=timeout_s)
        return TCPStore(host, self._port, is_master=False, wait_for_workers=False, timeout=patience)

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


def serve_rendezvous(address: str, stop: threading.Event, on_ready: Callable[[], None]) -> None:
    """Serve a rendezvous at host:port until `stop` is set. Raise `SpecInvalid` if this node cannot listen there."""
    try:
        check_port(address)
    except ValueError as err:
        raise SpecInvalid(str(err)) from err
    host, port = _split(address)
    own = own_address(host) if host else ""
    try:
        if not own or _answers(own, port):
            raise OSError("it is not an address of this node, or another process listens there already")
        store = serve_store(own, port)
    except OSError as err:
        raise SpecInvalid(f"expected host:port at which this node can listen, found {address!r}: {err}") from err
    on_ready()
    stop.wait()
    del store


def _split(address: str) -> tuple[str, int]:
    """Return host and port of host:port, where an IPv6 address has brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _answers(host: str, port: int) -> bool:
    """Return whether a process listens there: TCPStore prints its whole stack where none does."""
    with suppress(OSError), socket.create_connection((host, port), _CONNECT_S):
        return True
    return False
