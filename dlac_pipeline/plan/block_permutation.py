"""Permutation of the rows of a block: position k is row (a*k + c) mod R. docs/order.md has the rules for another one.

The inverse is one line of integer SQL. The scripts `row_positions`, `dead_positions`, `rows_seen`, `rows_at` and `cut_problems`
of `audit/sql` repeat both directions. A change of a permutation is another order (`cut.ORDER_VERSION`).
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from dlac_pipeline.plan.keys import derive_key, mix

_CANDIDATES = 16
MAX_BLOCK_ROWS = 2**31
"""A block has fewer rows, so that a*k + c fits into a BIGINT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPermutation:
    """position -> row: (a*position + c) mod rows. row -> position: a_inv*(row - c) mod rows."""

    rows: int
    a: int
    a_inv: int
    c: int

    def rows_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows at `positions`, int64, same shape."""
        return (self.a * positions + self.c) % self.rows

    def positions_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of `rows`, int64, same shape."""
        return (self.a_inv * ((rows - self.c + self.rows) % self.rows)) % self.rows


def choose_permutation(rows: int, key: int, *, shuffle: bool) -> BlockPermutation:
    """Return the map of a block of `rows` physical rows, drawn by `key`, or the identity without shuffling.

    Of 16 drawn multipliers the one is taken whose a/rows is hardest to approximate by fractions (smallest largest partial
    quotient of its continued fraction): its multiples, the rows of neighbouring positions, spread evenly over the block.
    """
    if not 0 < rows < MAX_BLOCK_ROWS:
        raise ValueError(f"expected a block of 1 to {MAX_BLOCK_ROWS - 1} rows, found {rows}: lower block_slices")
    if not shuffle or rows == 1:
        return BlockPermutation(rows=rows, a=1, a_inv=1, c=0)
    drawn = (_coprime(mix(derive_key(key, index)) % rows, rows) for index in range(_CANDIDATES))
    a = min(drawn, key=lambda candidate: (_largest_partial_quotient(candidate, rows), candidate))
    return BlockPermutation(rows=rows, a=a, a_inv=pow(a, -1, rows), c=mix(key) % rows)


def _coprime(start: int, rows: int) -> int:
    candidate = max(1, start)
    while gcd(candidate, rows) != 1:
        candidate += 1
    return candidate % rows


def _largest_partial_quotient(a: int, rows: int) -> int:
    largest = 0
    numerator, denominator = rows, a
    while denominator:
        largest = max(largest, numerator // denominator)
        numerator, denominator = denominator, numerator % denominator
    return largest
