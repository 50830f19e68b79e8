"""Deterministic keys and permutations: the same on every node and in every version of the libraries.

A change of what they give is another order (`cut.ORDER_VERSION`).

NumPy's generators may change between versions, so the order is built on splitmix64, written out here.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """One splitmix64 output for the 64-bit state `value`."""
    z = (value + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def derive_key(*labels: int) -> int:
    """A 64-bit key that depends on every label and on their order."""
    key = 0
    for label in labels:
        key = mix(key ^ (label & _MASK))
    return key


def draw_sort_keys(size: int, key: int) -> npt.NDArray[np.uint64]:
    """Return `size` different sort keys drawn by `key`, uint64 [size]. Each is mixed from its index."""
    z = np.arange(size, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
