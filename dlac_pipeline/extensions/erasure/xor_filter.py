"""Xor filter: a set of 64-bit keys in 9.84 bits each, in which every member is found, and 1 in 256 others.

After Graf and Lemire, "Xor Filters: Faster and Smaller Than Bloom and Cuckoo Filters" (2020). A key has one place in each third
of a table of bytes. The bytes at its places, combined by exclusive or, are its fingerprint.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
_PER_KEY, _SPARE = 1.23, 32
"""Bytes of the table. With fewer, the places of most sets of keys cannot be ordered."""
_TRIES = 100
_GOLDEN = 0x9E3779B97F4A7C15
_UINT64 = 2**64


@dataclass(frozen=True, slots=True)
class XorFilter:
    """A filter, and the seed with which it was built."""

    seed: int
    table: npt.NDArray[np.uint8]
    """Three thirds."""

    @classmethod
    def of(cls, keys: Keys) -> "XorFilter":
        """Build the filter of distinct keys, uint64 [n]. It takes about 4 s for a million."""
        third = -(-int(_PER_KEY * len(keys) + _SPARE) // 3)
        for seed in range(_TRIES):
            places = _places(keys, seed, third)
            rounds = _order(places, 3 * third)
            if sum(len(members) for members, _ in rounds) == len(keys):
                break
        else:
            raise RuntimeError(f"expected {len(keys)} distinct keys, found that {_TRIES} seeds separate none of them")
        table = np.zeros(3 * third, dtype=np.uint8)
        wanted = _fingerprints(keys, seed)
        for members, free in reversed(rounds):
            table[free] = wanted[members] ^ np.bitwise_xor.reduce(table[places[:, members]])
        return cls(seed, table)

    def has(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return True for each member, bool [n], and for 1 in 256 other keys."""
        found = np.bitwise_xor.reduce(self.table[_places(keys, self.seed, len(self.table) // 3)])
        return np.equal(found, _fingerprints(keys, self.seed))


def _order(places: Any, size: int) -> list[tuple[Any, Any]]:
    """Return rounds of (members, places): each member has a place that is of no member of its round or of a later one."""
    count, members = places.shape[1], np.zeros(size, dtype=np.int64)
    uses = np.bincount(places.ravel(), minlength=size)
    for row in places:
        np.bitwise_xor.at(members, row, np.arange(count))  # of one user it is that user
    rounds, free = [], np.flatnonzero(uses == 1)
    while len(free):
        mine, first = np.unique(members[free], return_index=True)
        rounds.append((mine, free[first]))
        touched = places[:, mine].ravel()
        np.subtract.at(uses, touched, 1)
        np.bitwise_xor.at(members, touched, np.tile(mine, 3))
        touched = np.unique(touched)
        free = touched[uses[touched] == 1]
    return rounds


def _places(keys: Keys, seed: int, third: int) -> Any:
    """Return a place of each key in each third, int64 [3, n]."""
    drawn = np.stack([_mix(keys, 3 * seed + part) >> np.uint64(32) for part in range(1, 4)])
    within = (drawn * np.uint64(third) >> np.uint64(32)).astype(np.int64)
    return within + np.arange(3)[:, None] * third


def _fingerprints(keys: Keys, seed: int) -> npt.NDArray[np.uint8]:
    return _mix(keys, -1 - seed).astype(np.uint8)


def _mix(keys: Keys, number: int) -> Keys:
    """Return one of many hashes of the keys: SplitMix64."""
    mixed = keys + np.uint64(number * _GOLDEN % _UINT64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
