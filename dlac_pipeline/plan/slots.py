"""Which slots of a global batch a reader reads, and which key groups give them.

A coordinate is a reader's place among all readers. Two readers differ by at most one slot.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataCoordinate:
    """Share of each global batch: the one at `index` of `count`, in the order of the slots. Several processes may read it."""

    index: int
    count: int

    def slots(self, batch_size: int) -> range:
        """Return the slots of a global batch that belong to the share."""
        return range(self.index * batch_size // self.count, (self.index + 1) * batch_size // self.count)


ALL_SLOTS = DataCoordinate(0, 1)
"""The share of an only reader."""


def groups_of_slots(slots: range, per_group: int) -> range:
    """Return the key groups that give a batch consecutive slots, `per_group` each."""
    return range(slots.start // per_group, -(-slots.stop // per_group))
