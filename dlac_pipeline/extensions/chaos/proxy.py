"""A proxy of TCP connections that can be cut: the network between a run and a server."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_ANSWERS_WITHIN_S = 10.0


class NetworkProxy:
    """Forwards connections at a local port to a server. While it is cut, it ends existing connections and refuses new ones.

    While it is stalled, all connections stay open without data.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._cut = threading.Event()
        self._moves = threading.Event()
        self._moves.set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        """Its own host:port."""
        self.is_used = False
        """True once a connection was forwarded."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End connections, and refuse new ones."""
        self._cut.set()
        for end in self._open:
            _end(end)

    def stall(self) -> None:
        """Accept and keep connections, and forward nothing."""
        self._moves.clear()

    def mend(self) -> None:
        """Forward again."""
        self._cut.clear()
        self._moves.set()

    @contextmanager
    def outage(self, *, silent: bool) -> Iterator[None]:
        """Cut it within the context, or stall it if the outage is `silent`."""
        (self.stall if silent else self.cut)()
        try:
            yield
        finally:
            self.mend()

    def close(self) -> None:
        """End all connections."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._cut.is_set():
                    _end(near)
                    continue
                try:
                    far = socket.create_connection(self._server, timeout=_ANSWERS_WITHIN_S)
                except OSError:
                    _end(near)
                    continue
                far.settimeout(None)
                self.is_used = True
                self._open = [*(each for each in self._open if each.fileno() >= 0), near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=_forward, args=(source, target, self._moves), daemon=True).start()
                if self._cut.is_set():  # since the last check
                    _end(near)
                    _end(far)


def _forward(source: socket.socket, target: socket.socket, moves: threading.Event) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            moves.wait()
            target.sendall(content)
    _end(source)
    _end(target)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
