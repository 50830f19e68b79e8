"""Ports for servers that are started later, at an address that is known before."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def own_port() -> int:
    """A port of this machine that nobody else is given as long as this process lives; whoever connects to it is refused.

    It is bound here and not listened on. A server that asks for this very port gets it all the same, also when it is started
    again, as long as it sets SO_REUSEADDR, which servers do.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])
