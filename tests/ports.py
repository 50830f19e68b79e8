"""Ports for servers that start later, at an address that is known before."""

import socket

_HELD: list[socket.socket] = []


def own_port() -> int:
    """Reserve a port of this node for the life of this process. Until a server listens, connections are refused.

    The port is bound here without listening. A server with SO_REUSEADDR, which is usual, can still listen on this port, also
    when it is started again.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])
