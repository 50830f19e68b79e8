"""Process group of the replica groups present: torchft's over Gloo, whose connections are closed in threads of their own.

Gloo sometimes waits for ever when it closes the connections of a group with a dead member. A step must not wait for that.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torchft import ProcessGroupGloo


class Peers(ProcessGroupGloo):  # type: ignore[misc]  # published without types
    """Process group of the groups present. Each quorum with other members configures it again."""

    _pg: Any
    collective_timeout: timedelta
    """Time limit of a collective. That of connecting is the group's own: a peer may die before it connects."""

    def abort(self, errored: bool = True) -> None:
        """Close the connections in the background."""
        self.drop(())

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        group = super()._create_pg(store, rank, world_size)
        group._get_backend(torch.device("cpu"))._set_default_timeout(self.collective_timeout)
        return group

    def drop(self, works: Sequence[Any]) -> None:
        """Close the connections in the background after failed collectives. Peers that wait for this group fail at once.

        The connections close once nothing refers to them. torchft's `works` are in reference cycles, and refer to Gloo's.
        """
        connected = [self._pg, *(vars(work).pop("_work", None) for work in works)]
        self._pg = None
        threading.Thread(target=connected.clear, name="closing", daemon=True).start()
