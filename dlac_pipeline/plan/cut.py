"""One pass, cut: units permuted, laid end to end, dealt to key groups, and walked in blocks.

A pass is cut once; everything here is a pure function of (units, order settings, pass, rows dealt before).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dlac_pipeline.plan.affine import Affine, choose
from dlac_pipeline.plan.keys import derive_key, permutation
from dlac_pipeline.plan.units import Ints, UnitTable

ORDER_VERSION = 1
_UNITS, _BLOCK = 1, 2
"""Labels that keep the keys of the two kinds of permutation apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """What, besides the plan, determines the order."""

    seed: int
    key_groups: int
    batch_size: int
    block_slices: int
    shuffle: bool
    version: int = ORDER_VERSION

    def __post_init__(self) -> None:
        if self.batch_size % self.key_groups:
            raise ValueError(f"expected key_groups to divide batch_size, found {self.key_groups} and {self.batch_size}")

    @property
    def samples_per_group(self) -> int:
        """Samples that one key group gives to one global batch (B/G)."""
        return self.batch_size // self.key_groups


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of one key group in walking order: rows first .. first+rows-1 of each unit."""

    unit: Ints
    first: Ints
    rows: Ints
    live: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The slices that a key group shuffles together."""

    index: int
    slices: Slices
    base: Ints
    """First row of each slice within the block."""
    affine: Affine
    live_positions: Ints | None
    """Positions of the live rows, sorted; None when all rows are live."""
    live_rows: int

    @property
    def rows(self) -> int:
        """Physical rows (R)."""
        return self.affine.rows

    def position_after(self, live: int) -> int:
        """The cursor position right behind the `live`-th live row (1-based); 0 before the first."""
        if live == 0:
            return 0
        return live if self.live_positions is None else int(self.live_positions[live - 1]) + 1

    def rows_of(self, live_start: int, live_stop: int) -> Ints:
        """Block rows of the live samples live_start..live_stop-1, in reading order, int64."""
        if self.live_positions is None:
            return self.affine.rows_at(live_start, live_stop)
        return (self.affine.a * self.live_positions[live_start:live_stop] + self.affine.c) % self.rows


def deal(live_rows: int, dealt: Ints) -> Ints:
    """How many of `live_rows` each key group gets, given what it was dealt before; int64 [G].

    Group g gets max(0, floor((M+g)/G) - t_g), M being the smallest number for which these sum to `live_rows`: over many
    passes and appends all groups stay level.
    """
    groups = len(dealt)
    offsets = np.arange(groups, dtype=np.int64)

    def share(m: int) -> Ints:
        shares: Ints = np.maximum(0, (m + offsets) // groups - dealt)
        return shares

    low, high = 0, int(live_rows + groups * (dealt.max(initial=0) + 1))
    while low < high:
        middle = (low + high) // 2
        if int(share(middle).sum()) >= live_rows:
            high = middle
        else:
            low = middle + 1
    return share(low)


class PassCut:
    """All key groups' segments of one pass."""

    def __init__(self, units: UnitTable, settings: OrderSettings, pass_index: int, dealt_before: Ints) -> None:
        self.units = units
        self.settings = settings
        self.pass_index = pass_index
        self.dealt_before = dealt_before
        live = units.live_rows
        if settings.shuffle:
            line = permutation(len(units), derive_key(settings.seed, _UNITS, pass_index))
        else:
            line = np.arange(len(units), dtype=np.int64)
        self._line = line[live[line] > 0]
        self._live = live[self._line]
        self._line_end = np.cumsum(self._live)
        self.dealt = deal(int(live.sum()), dealt_before)
        self._segment_end = np.cumsum(self.dealt)
        self.block = lru_cache(maxsize=4 * settings.key_groups)(self._block)
        self.slices = lru_cache(maxsize=None)(self._cut)
        self.live_before_block = lru_cache(maxsize=None)(self._live_before_block)

    def block_count(self, group: int) -> int:
        """Blocks that key group `group` walks in this pass."""
        return -(-len(self.slices(group).unit) // self.settings.block_slices)

    def _live_before_block(self, group: int) -> Ints:
        """Live rows of the group's segment before each block and after the last, int64 [blocks + 1]."""
        ends = np.concatenate(([0], np.cumsum(self.slices(group).live)))
        starts = np.arange(0, self.block_count(group) * self.settings.block_slices, self.settings.block_slices)
        return np.append(ends[starts], ends[-1]).astype(np.int64)

    def _cut(self, group: int) -> Slices:
        """The slices of key group `group`, in walking order."""
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
        return Slices(unit, first, end - first, live_to - live_from)

    def _physical(self, unit: int, live: int) -> int:
        """Where a unit is cut before its `live`-th live row; dead rows at a cut go left."""
        if live == 0 or unit not in self.units.dead:
            return live
        offsets = self.units.live_offsets(unit)
        return int(self.units.rows[unit]) if live == len(offsets) else int(offsets[live])

    def _block(self, group: int, index: int) -> Block:
        every, whole = self.settings.block_slices, self.slices(group)
        chosen = slice(index * every, (index + 1) * every)
        part = Slices(whole.unit[chosen], whole.first[chosen], whole.rows[chosen], whole.live[chosen])
        rows = int(part.rows.sum())
        key = derive_key(self.settings.seed, _BLOCK, self.pass_index, group, index)
        affine = choose(rows, key, shuffle=self.settings.shuffle)
        base = np.cumsum(part.rows) - part.rows
        positions = self._live_positions(part, base, affine) if int(part.live.sum()) < rows else None
        return Block(
            index=index, slices=part, base=base, affine=affine, live_positions=positions, live_rows=int(part.live.sum())
        )

    def _live_positions(self, slices: Slices, base: Ints, affine: Affine) -> Ints:
        live = []
        for unit, first, rows, start in zip(slices.unit, slices.first, slices.rows, base, strict=True):
            offsets = self.units.live_offsets(int(unit))
            live.append(start - first + offsets[(offsets >= first) & (offsets < first + rows)])
        return np.sort(affine.positions_of(np.concatenate(live)))
