"""Slots of a global batch: the ranks that work on them, and the key groups that fill them.

Readers and the commands that look a step up share these functions, so that both name the same rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataCoordinate:
    """Share of each global batch that a process reads: the one at `index` of `count`, in the order of the slots."""

    index: int
    count: int


def slots_of(place: int, ranks: int, batch_size: int) -> range:
    """Return the slots of a global batch that the rank at a place works on. Two ranks differ by at most one slot."""
    return range(place * batch_size // ranks, (place + 1) * batch_size // ranks)


def rank_index_of(slot: int, ranks: int, batch_size: int) -> int:
    """Return the place of the rank that works on a slot, as `slots_of` divides them."""
    return ((slot + 1) * ranks - 1) // batch_size


def groups_of_slots(low: int, high: int, per_group: int) -> range:
    """Return the key groups that give a batch its slots from `low` to before `high`, `per_group` each."""
    return range(low // per_group, -(-high // per_group))
