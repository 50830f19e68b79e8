"""Process group of the replica groups present: torchft's over Gloo, whose connections are closed in threads of their own.

Gloo sometimes waits for ever when it closes the connections of a group with a dead member. A step must not wait for that.
"""

import threading
from typing import Any

from torchft import ProcessGroupGloo


class Peers(ProcessGroupGloo):  # type: ignore[misc]  # published without types
    """Process group of the groups present. Each quorum with other members configures it again."""

    def abort(self, errored: bool = True) -> None:
        """Close the connections in the background. Peers that wait for this group then fail at once."""
        connected = [self._pg]
        self._pg = None
        bury(connected)


def bury(objects: list[Any]) -> None:
    """Release objects in the background. The list has the only references to them."""
    threading.Thread(target=objects.clear, name="burial", daemon=True).start()
