"""Records of a run in the store: the lease of the leader, other nodes as it has read them, and the plan of a round."""

import time
from dataclasses import dataclass, field

from dlac_pipeline.elastic.rank_assignment import RoundPlan
from dlac_pipeline.elastic.sealed_store import Message, SealedStore

LEASE = "lease"
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
    """Return the name of the leader's announcement on a subject in the round of the lease."""
    return f"{name_of_plan(lease['round'], lease['formed_by'])}/{subject}/{version}"


def name_of_plan(number: int, formed_by: int) -> str:
    """Return the name of a round's plan. `formed_by` is the slot of the leader that formed it."""
    return f"round/{number}/{formed_by}"


def read_round(store: SealedStore, *, number: int, formed_by: int, slot: int = 0) -> RoundPlan | None:
    """Return the part of a round's plan for the node in `slot`, or else the whole plan. None: no plan is written."""
    part = (store.read(f"member/{slot}").message if slot else None) or {}
    if (part.get("number"), part.pop("formed_by", 0)) == (number, formed_by):
        return RoundPlan.of(part)
    message = store.read(name_of_plan(number, formed_by)).message
    return None if message is None else RoundPlan.of(message)


def later_number(number: int) -> int:
    """Return a greater number, at least the milliseconds since 1970."""
    return max(number + 1, time.time_ns() // 10**6)
