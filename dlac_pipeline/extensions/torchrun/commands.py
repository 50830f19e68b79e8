"""The command `dlac rendezvous`: it serves the rendezvous of runs, in a process that is no node of them."""

import signal
import threading
from collections.abc import Callable
from typing import Annotated

from typer import Argument

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.errors import SpecInvalid

PANEL = "Train"


@ui.extension_command("dlac rendezvous node-1:29400")
def rendezvous(address: Annotated[str, Argument(help="host:port, the same address as on the nodes of a run.")]) -> None:
    """Serve the rendezvous of runs on several nodes, on a node that outlives them. SIGTERM or Ctrl-C ends it.

    Without this command one of the nodes serves it, and the others cannot meet while that node is unavailable.
    """
    from dlac_pipeline.launchers.signals import on_signals

    stop = threading.Event()
    on_signals((signal.SIGINT, signal.SIGTERM), stop.set)
    serve_rendezvous(address, stop, lambda: ui.show_text(f"serving the rendezvous at {address}"))


def serve_rendezvous(address: str, stop: threading.Event, on_ready: Callable[[], None]) -> None:
    """Serve a rendezvous at host:port until `stop` is set. Raise `SpecInvalid` if this node cannot listen there."""
    from dlac_pipeline.elastic.endpoint import is_listening, split_address
    from dlac_pipeline.elastic.ranks.addresses import own_address
    from dlac_pipeline.elastic.ranks.process_group import serve_store
    from dlac_pipeline.spec.launch_spec import check_port

    try:
        check_port(address)
    except ValueError as err:
        raise SpecInvalid(str(err)) from err
    host, port = split_address(address)
    own = own_address(host) if host else ""
    try:
        if not own or is_listening(own, port):
            raise OSError("it is not an address of this node, or another process listens there already")
        store = serve_store(own, port)
    except OSError as err:
        raise SpecInvalid(f"expected host:port at which this node can listen, found {address!r}: {err}") from err
    on_ready()
    stop.wait()
    del store
