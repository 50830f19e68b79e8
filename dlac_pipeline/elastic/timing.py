"""Timing of heartbeats and rounds. Only the clock of the node itself counts."""

from collections.abc import Callable

from dlac_pipeline.spec.launch_spec import LaunchSpec

BRISK_FOR_S = 5.0
"""Time after the last news in which a node beats as often as if it waited."""
_EVERY_S = 0.25
_QUIET_S = 1.0
_READ_OFTEN = 256
"""Nodes up to which the leader reads all of them every time. Of more it reads as many per second."""
_BUSY_MARGIN_S = 10.0
"""Extra seconds for nodes, past the time in which ranks exit, until a round is formed without them."""


def pause_of_leader(nodes: int) -> float:
    """Return the pause of the node that leads."""
    return _EVERY_S * max(1.0, nodes / _READ_OFTEN)


def pause_of_node(*, is_quiet: bool, node_timeout_s: float) -> float:
    """Return the pause of another node. `is_quiet`: all train, and there was no news for a while."""
    return min(_QUIET_S, node_timeout_s / 10) if is_quiet else _EVERY_S


class LastCall:
    """Wait of the leader for more nodes once enough exist for a round."""

    def __init__(self, launch: LaunchSpec, now: Callable[[], float]) -> None:
        self._launch = launch
        self._now = now
        self._enough_since: float | None = None

    def begin_anew(self) -> None:
        """Forget since when there have been enough nodes."""
        self._enough_since = None

    def is_over(self, ready: int, *, busy: bool) -> bool:
        """Return whether a round of the nodes that are ready is formed. `busy`: a node of the last one still ends its ranks."""
        if ready < self._launch.min_nodes:
            self._enough_since = None
            return False
        self._enough_since = self._now() if self._enough_since is None else self._enough_since
        waited_s = self._now() - self._enough_since
        if busy:  # a node that hangs is not waited for without an end
            return waited_s >= self._launch.leave_s + _BUSY_MARGIN_S
        return ready >= self._launch.max_nodes or waited_s >= self._launch.last_call_s
