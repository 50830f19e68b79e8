"""Lighthouse of the replica groups: torchft's server, which forms their quorums, in threads of the supervisor's process.

No rank outlives its supervisor, so the lighthouse needs no supervision of its own.
"""

import os
from typing import Any
from urllib.parse import urlsplit

from dlac_pipeline.elastic.ranks.addresses import LOOPBACK
from dlac_pipeline.lakehouse.errors import SpecInvalid

_HEARTBEAT_TIMEOUT_MS = 400
"""Milliseconds without a heartbeat after which a group is dead. Its manager sends one every 50 ms, from a thread of its own."""
_TICK_MS = 10
_STRAGGLERS_MS = 60_000
"""Milliseconds for which a quorum waits for groups that are alive: as long as their peers would wait in a collective."""


class Lighthouse:
    """Lighthouse of one supervisor. It listens at loopback."""

    def __init__(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # it would write lines for each step
        try:
            from torchft.coordination import LighthouseServer
        except ImportError as err:
            raise SpecInvalid(
                f"expected torchft for launch.replicas, found none ({err}): pip install 'dlac-pipeline[torchft]'"
            ) from err
        self._server: Any = LighthouseServer(
            bind=f"{LOOPBACK}:0",
            min_replicas=1,
            join_timeout_ms=_STRAGGLERS_MS,
            quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS,
        )

    @property
    def address(self) -> str:
        """Its address, for the groups on this node."""
        return f"http://{LOOPBACK}:{urlsplit(self._server.address()).port}"

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
