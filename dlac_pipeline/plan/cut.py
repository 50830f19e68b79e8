"""Cut of one pass: units permuted, laid end to end, dealt to key groups, and walked in blocks. See docs/order.md.

A pass is cut once. The place of its slices is a pure function of (units, cut settings, pass, rows dealt before). Exclusions
may add skipped rows later. They never move a slice, nor a row within its block.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from dlac_pipeline.plan.units import Ints, UnitTable

ORDER_VERSION = 2
"""Version of the order of rows. Raise it whenever a row changes its place. Legs record it."""
_UNITS, _BLOCK = 1, 2
"""Labels that keep the keys of the two kinds of permutation apart."""
_CANDIDATES = 16
MAX_BLOCK_ROWS = 2**31
"""A block has fewer rows, so that a*k + c fits into a BIGINT."""
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
"""Constants of splitmix64, written out here because NumPy's generators may change between versions.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPermutation:
    """position -> row: (a*position + c) mod rows. row -> position: a_inv*(row - c) mod rows."""

    rows: int
    a: int
    a_inv: int
    c: int

    def rows_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows at `positions`, int64, same shape."""
        is_identity = (self.a, self.c) == (1, 0)
        return positions if is_identity else (self.a * positions + self.c) % self.rows

    def positions_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of `rows`, int64, same shape."""
        return (self.a_inv * ((rows - self.c + self.rows) % self.rows)) % self.rows


@dataclass(frozen=True, kw_only=True, slots=True)
class CutSettings:
    """Settings that, with the plan and the rows dealt before, determine how a pass of one source is cut."""

    seed: int
    key_groups: int
    block_slices: int
    shuffle: bool
    source: int = 0
    version: int = ORDER_VERSION


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of one key group in walking order: rows first .. first+rows-1 of each unit."""

    unit: Ints
    first: Ints
    rows: Ints
    live: Ints

    def part(self, start: int, stop: int) -> "Slices":
        """The slices start .. stop-1."""
        chosen = slice(start, stop)
        return Slices(self.unit[chosen], self.first[chosen], self.rows[chosen], self.live[chosen])


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The slices that a key group shuffles together."""

    index: int
    slices: Slices
    base: Ints
    """First row of each slice within the block."""
    permutation: BlockPermutation
    live_positions: Ints | None
    """Positions of the live rows, sorted, or None when all rows are live."""
    live_rows: int

    @property
    def rows(self) -> int:
        """Physical rows (R)."""
        return self.permutation.rows

    def position_after(self, live: int) -> int:
        """Return the cursor position directly after the `live`-th live row (1-based), or 0 before the first."""
        if live == 0:
            return 0
        return live if self.live_positions is None else int(self.live_positions[live - 1]) + 1

    def live_until(self, position: int) -> int:
        """Live rows at positions below `position`."""
        return position if self.live_positions is None else int(np.searchsorted(self.live_positions, position))

    def place_of(self, position: int) -> tuple[int, int]:
        """Unit, and row in the unit, of a position."""
        units, rows = self.places_of(np.array([position]))
        return int(units[0]), int(rows[0])

    def places_of(self, positions: Ints) -> tuple[Ints, Ints]:
        """Units, and rows in the units, of positions: int64, same shape."""
        rows = self.permutation.rows_at(positions)
        index = np.searchsorted(self.base, rows, side="right") - 1
        return self.slices.unit[index], self.slices.first[index] + rows - self.base[index]

    def positions_of(self, live_start: int, live_stop: int) -> Ints:
        """Positions of the live samples live_start..live_stop-1, int64, increasing."""
        if self.live_positions is None:
            return np.arange(live_start, live_stop, dtype=np.int64)
        return self.live_positions[live_start:live_stop]

    def rows_of(self, live_start: int, live_stop: int) -> Ints:
        """Block rows of the live samples live_start..live_stop-1, in reading order, int64."""
        return self.permutation.rows_at(self.positions_of(live_start, live_stop))


def deal(live_rows: int, dealt: Ints) -> Ints:
    """Return the number of `live_rows` for each key group, given the number that it was dealt before: int64 [G].

    Group g gets max(0, floor((M+g)/G) - t_g), M being the smallest number for which these sum to `live_rows`. Over many
    passes and appends all groups stay level.
    """
    groups = len(dealt)
    offsets = np.arange(groups, dtype=np.int64)

    def share(m: int) -> Ints:
        shares: Ints = np.maximum(0, (m + offsets) // groups - dealt)
        return shares

    most = int(live_rows + groups * (dealt.max(initial=0) + 1))
    return share(bisect_left(range(most), live_rows, key=lambda m: int(share(m).sum())))


class PassCut:
    """All key groups' segments of one pass. Rows that are dead in `live_units` are skipped in place."""

    def __init__(
        self,
        units: UnitTable,
        settings: CutSettings,
        pass_index: int,
        dealt_before: Ints,
        live_units: UnitTable | None = None,
    ) -> None:
        self.units = units
        self.settings = settings
        self.pass_index = pass_index
        self.dealt_before = dealt_before
        self.live_units = units if live_units is None else live_units
        live = units.live_rows
        alive = np.flatnonzero(live > 0)
        self._line = alive[_line(live[alive], settings, pass_index)]
        self._live = live[self._line]
        self._line_end = np.cumsum(self._live)
        self.dealt = deal(int(live.sum()), dealt_before)
        self._segment_end = np.cumsum(self.dealt)
        self.block = lru_cache(maxsize=4 * settings.key_groups)(self._block)
        self.slices = lru_cache(maxsize=None)(self._cut)
        self.live_before_block = lru_cache(maxsize=None)(self._live_before_block)

    def live_rows(self, group: int) -> int:
        """Rows that key group `group` consumes in this pass: those it was dealt, less exclusions."""
        return int(self.dealt[group]) if self.live_units is self.units else int(self.live_before_block(group)[-1])

    def block_count(self, group: int) -> int:
        """Blocks that key group `group` walks in this pass."""
        return -(-len(self.slices(group).unit) // self.settings.block_slices)

    def live_before(self, group: int, block: int, position: int) -> int:
        """Live rows of the group's segment before a position of one of its blocks."""
        if not self.block_count(group):
            return 0
        before = int(self.live_before_block(group)[block])
        return before + (self.block(group, block).live_until(position) if position else 0)

    def _live_before_block(self, group: int) -> Ints:
        """Live rows of the group's segment before each block and after the last, int64 [blocks + 1]."""
        ends = np.concatenate(([0], np.cumsum(self.slices(group).live)))
        starts = np.arange(0, self.block_count(group) * self.settings.block_slices, self.settings.block_slices)
        return np.append(ends[starts], ends[-1]).astype(np.int64)

    def _cut(self, group: int) -> Slices:
        """Return the slices of key group `group`, in walking order. `live` counts the live rows of `live_units`."""
        stop = int(self._segment_end[group])
        start = stop - int(self.dealt[group])
        if start == stop:
            empty = np.zeros(0, dtype=np.int64)
            return Slices(empty, empty, empty, empty)
        left = int(np.searchsorted(self._line_end, start, side="right"))
        right = int(np.searchsorted(self._line_end, stop, side="left"))
        unit = self._line[left : right + 1]
        live_start = self._line_end[left : right + 1] - self._live[left : right + 1]
        live_from = np.maximum(0, start - live_start)
        live_to = np.minimum(self._live[left : right + 1], stop - live_start)
        first, end = np.zeros_like(unit), self.units.rows[unit]
        first[0] = self._physical(int(unit[0]), int(live_from[0]))
        end[-1] = self._physical(int(unit[-1]), int(live_to[-1]))
        live = live_to - live_from
        if self.live_units is not self.units:
            live = self._still_live(unit, first, end, live)
        return Slices(unit, first, end - first, live)

    def _still_live(self, units: Ints, first: Ints, end: Ints, live: Ints) -> Ints:
        still = live.copy()
        for index, unit in enumerate(units.tolist()):
            if self.live_units.dead_rows(unit) != self.units.dead_rows(unit):
                offsets = self.live_units.live_offsets(unit)
                still[index] = np.count_nonzero((offsets >= first[index]) & (offsets < end[index]))
        return still

    def _physical(self, unit: int, live: int) -> int:
        """Return where a unit is cut before its `live`-th live row. Dead rows at a cut go left."""
        if live == 0 or unit not in self.units.dead:
            return live
        offsets = self.units.live_offsets(unit)
        return int(self.units.rows[unit]) if live == len(offsets) else int(offsets[live])

    def _block(self, group: int, index: int) -> Block:
        every, whole = self.settings.block_slices, self.slices(group)
        part = whole.part(index * every, (index + 1) * every)
        rows = int(part.rows.sum())
        key = derive_key(self.settings.seed, _BLOCK, self.settings.source, self.pass_index, group, index)
        permutation = choose_permutation(rows, key, shuffle=self.settings.shuffle)
        base = np.cumsum(part.rows) - part.rows
        positions = self._live_positions(part, base, permutation) if int(part.live.sum()) < rows else None
        return Block(
            index=index,
            slices=part,
            base=base,
            permutation=permutation,
            live_positions=positions,
            live_rows=int(part.live.sum()),
        )

    def _live_positions(self, slices: Slices, base: Ints, permutation: BlockPermutation) -> Ints:
        live = []
        for unit, first, rows, start in zip(slices.unit, slices.first, slices.rows, base, strict=True):
            offsets = self.live_units.live_offsets(int(unit))
            live.append(start - first + offsets[(offsets >= first) & (offsets < first + rows)])
        return np.sort(permutation.positions_of(np.concatenate(live)))


def _line(live: Ints, settings: CutSettings, pass_index: int) -> Ints:
    """Return the units with these live rows (int64 [units], all above 0) in the order in which they are laid end to end.

    Units are in table order. They are divided into as many strata of equal rows as slices are read at a time (G*S). Each
    stratum is bound to one of the S lanes of a key group for the pass, and its units, shuffled, are spread evenly over the
    group's segment. So at any time the slices being read come one from each stratum. All of a sorted table is mixed in every
    batch, more evenly than by drawing units from one urn, and for any cut of the segments.
    """
    units = np.arange(len(live), dtype=np.int64)
    if not settings.shuffle or not len(live):
        return units
    key = derive_key(settings.seed, _UNITS, settings.source, pass_index)
    strata = settings.key_groups * settings.block_slices
    middle = np.cumsum(live) - (live + 1) // 2
    lane_of = np.argsort(draw_sort_keys(strata, derive_key(key, 1)), kind="stable")
    lane = lane_of[middle * strata // int(live.sum())]
    by_lane = np.lexsort((draw_sort_keys(len(live), derive_key(key, 2)), lane))
    rows, lane = live[by_lane], lane[by_lane]
    lane_rows = np.zeros(strata, dtype=np.int64)
    np.add.at(lane_rows, lane, rows)
    before = np.cumsum(rows) - rows - (np.cumsum(lane_rows) - lane_rows)[lane]
    share = (before + rows / 2) / lane_rows[lane]
    group, place = lane % settings.key_groups, lane // settings.key_groups
    return units[by_lane[np.lexsort((place, share, group))]]


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


def mix(value: int) -> int:
    """Return splitmix64's output for the 64-bit state `value`."""
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
