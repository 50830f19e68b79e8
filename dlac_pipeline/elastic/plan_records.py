"""The plan of a round in the store: all of it for a node that leads, and for each other member its own part.

The part is as large however many nodes there are. It is written over that of the round before. A member whose part a stranger has
overwritten reads the whole plan.
"""

from __future__ import annotations

from dlac_pipeline.elastic.rank_assignment import RoundPlan
from dlac_pipeline.elastic.sealed_store import SealedStore


def name_of_plan(number: int, formed_by: int) -> str:
    """Return the name of a round's plan. `formed_by` is the slot of the leader that formed it."""
    return f"round/{number}/{formed_by}"


def publish_parts(store: SealedStore, plan: RoundPlan, *, formed_by: int) -> None:
    """Write the part of each member."""
    parts = {member.slot: plan.part(member.place).message() for member in plan.members}
    store.publish_all({_name_of_part(slot): {**part, "formed_by": formed_by} for slot, part in parts.items()})


def read_part(store: SealedStore, slot: int, *, number: int, formed_by: int) -> RoundPlan | None:
    """Return a node's part of a round's plan. None: the node is no member, or its part is not written."""
    message = store.read(_name_of_part(slot)).message or {}
    if (message.get("number"), message.pop("formed_by", 0)) != (number, formed_by):
        return None
    return RoundPlan.of(message)


def read_plan(store: SealedStore, *, number: int, formed_by: int) -> RoundPlan | None:
    """Return all of a round's plan, or None if it is not written."""
    message = store.read(name_of_plan(number, formed_by)).message
    return None if message is None else RoundPlan.of(message)


def _name_of_part(slot: int) -> str:
    return f"member/{slot}"
