"""The command `dlac rendezvous`."""

import signal
import threading
from typing import Annotated

from typer import Argument

from dlac_pipeline.cli import shared as ui

PANEL = "Train"


@ui.extension_command("dlac rendezvous node-1:29400")
def rendezvous(address: Annotated[str, Argument(help="host:port, the same address as on the nodes of a run.")]) -> None:
    """Serve the rendezvous of runs on several nodes, on a node that outlives them. SIGTERM or Ctrl-C ends it.

    Without this command one of the nodes serves it, and the others cannot meet while that node is unavailable.
    """
    from dlac_pipeline.elastic.endpoint import serve_rendezvous
    from dlac_pipeline.launchers.orchestrator import on_signals

    stop = threading.Event()
    on_signals((signal.SIGINT, signal.SIGTERM), stop.set)
    serve_rendezvous(address, stop, lambda: ui.show_text(f"serving the rendezvous at {address}"))
