"""Process group of the replica groups present: torchft's over Gloo, whose connections are closed in threads of their own.

Gloo sometimes waits for ever when it closes the connections of a group with a dead member. A step must not wait for that.
"""

import threading
from collections.abc import Sequence
from typing import Any

from torchft import ProcessGroupGloo


class Peers(ProcessGroupGloo):  # type: ignore[misc]  # published without types
    """Process group of the groups present. Each quorum with other members configures it again."""

    _pg: Any

    def abort(self, errored: bool = True) -> None:
        """Close the connections in the background."""
        self.drop(())

    def drop(self, works: Sequence[Any]) -> None:
        """Close the connections in the background after failed collectives. Peers that wait for this group fail at once.

        The connections close once nothing refers to them. torchft's `works` are in reference cycles, and refer to Gloo's.
        """
        connected = [self._pg, *(vars(work).pop("_work", None) for work in works)]
        self._pg = None
        threading.Thread(target=connected.clear, name="closing", daemon=True).start()
