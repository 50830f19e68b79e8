"""The lease of the node that leads, and what that node knows of another one. Numbers here only count up.

In: a lease as it is stored. Out: names and numbers that are built on it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dlac_pipeline.elastic.plan_records import name_of_plan
from dlac_pipeline.elastic.sealed_store import Message

LEASE = "lease"
"""Name of its record."""
NO_LEASE: Message = {
    "slot": 0,
    "id": "",
    "slots": 0,
    "beat": 0,
    "round": 0,
    "formed_by": 0,
    "announced": {},
    "message": {},
    "training": False,
    "ended": None,
}


@dataclass(slots=True)
class Peer:
    """Another node, as the leader has read it."""

    record: Message = field(default_factory=dict)
    id: str = ""
    beat: int = -1
    """Last heartbeat that was read. -1: none yet. The first one may be of a node that died long ago, and does not count."""
    heard_at: float = 0.0
    entered: int = 0
    """Last round that it took part in."""


def name_of_announcement(lease: Message, subject: str, version: int) -> str:
    """Return the name of what the leader announces on a subject in the round of the lease."""
    return f"{name_of_plan(lease['round'], lease['formed_by'])}/{subject}/{version}"


def later_number(number: int) -> int:
    """Return a greater number, at least the milliseconds since 1970."""
    return max(number + 1, time.time_ns() // 10**6)
