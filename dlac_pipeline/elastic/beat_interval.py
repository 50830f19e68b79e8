"""The time between two beats of a node: short while nodes wait for each other, long while all train.

In: what a node does, and how many nodes there are. Out: seconds.
"""

BRISK_FOR_S = 5.0
"""Time after the last news in which a node beats as often as if it waited."""
_EVERY_S = 0.25
_QUIET_S = 1.0
_READ_OFTEN = 256
"""Nodes up to which the leader reads all of them every time; of more it reads as many per second."""


def pause_of_leader(nodes: int) -> float:
    """Return the pause of the node that leads."""
    return _EVERY_S * max(1.0, nodes / _READ_OFTEN)


def pause_of_node(*, is_quiet: bool, node_timeout_s: float) -> float:
    """Return the pause of another node. `is_quiet`: all train, and there was no news for a while."""
    return min(_QUIET_S, node_timeout_s / 10) if is_quiet else _EVERY_S
