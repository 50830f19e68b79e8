"""Addresses of this node: the address of a name, its network interface, and sockets. Imports no PyTorch."""

import socket
from contextlib import suppress
from ipaddress import ip_address

import psutil

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the network interface of Gloo. By default Gloo takes the interface that this node's name resolves to, or loopback."""
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of no node (RFC 5737): the route to it shows the address by which this node reaches others."""


def own_address(host: str) -> str:
    """Return the address of this node that `host` stands for. Empty if `host` is another node.

    A node's name may stand for loopback in its hosts file. It means the address from which this node reaches others then.
    """
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        own = [str(address[0]) for family, *_, address in found if _binds(family, str(address[0]))]
        if not own:
            return ""
        hidden = all(_is_loopback(address) for address in own) and not _means_loopback(host)
        return (routed_address() or own[0]) if hidden else own[0]
    return ""


def stands_for_loopback(host: str) -> bool:
    """Return whether all addresses that `host` resolves to on this node are loopback's, which no other node reaches."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        return all(_is_loopback(str(address[0])) for *_, address in found)
    return False


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at this address alone. Port 0: any free one. Raise `OSError` if another one does."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def free_port() -> int:
    """Return a port at which no process listens, on any address of this node."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def interface_of(address: str) -> str:
    """Return the network interface with an address of this node. Empty for a loopback address, and for none."""
    with suppress(OSError):
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == found for each in addresses):
                return name if found == address or not _is_loopback(str(found)) else ""
    return ""


def _binds(family: int, address: str) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _means_loopback(host: str) -> bool:
    """Return whether `host` names loopback itself, rather than a node that its hosts file maps to loopback."""
    name = host.lower().rstrip(".")
    with suppress(ValueError):
        return bool(ip_address(name))
    return name.split(".")[-1] in ("localhost", "ip6-localhost", "ip6-loopback", "localdomain", "localhost6")


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ip_address(address.partition("%")[0]).is_loopback
    return False


def routed_address() -> str:
    """Return the address from which this node reaches others. Empty if it reaches none. Sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        return str(probe.getsockname()[0])
    return ""
